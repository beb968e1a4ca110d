"""Monitor: writes a run's metrics to `metrics.jsonl`, step by step.

Invariants:
- `metrics.jsonl` has one whole line per step and part: `keep_until` removes the steps that a
  resumed run repeats, and a step that is repeated nevertheless replaces its line. Evaluations of
  a step share its line, since each taskset has its own names: one that is repeated replaces these.
- Two processes may write the same file: each line is appended under a lock, and neither process
  keeps the file open, since it may be replaced by a shorter one.
- A number that is not finite is written as null, never as text that JSON does not allow.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trireme.files import (
    append,
    in_turn,
    read_jsonl,
    whole_lines,
    write_jsonl,
)
from trireme.monitor.events import Event, measured

FILE_NAME = "metrics.jsonl"
EVALUATIONS = ("eval", "bench")
"""Parts that log a step once for each taskset."""


class JsonLinesMonitor:
    """Appends a line `{"time", "part", "step", "metrics"}` to `<folder>/metrics.jsonl`."""

    name = FILE_NAME

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self.path.with_name(f".{FILE_NAME}.lock")
        with in_turn(self._lock):
            whole_lines(self.path)
            self._steps = {(row["part"], row["step"]) for row in _rows(self.path)}

    def keep_until(self, steps: Mapping[str, int]) -> None:
        """Remove the lines of each named part after the given step."""
        if any(step > steps.get(part, step) for part, step in self._steps):
            self._rewrite(lambda row: row["step"] <= steps.get(row["part"], row["step"]))

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """Write a line with one write call; an earlier line of the same step is removed, but an
        evaluation's metrics of other names are kept.
        """
        written = {name: _finite(value) for name, value in metrics.items()}
        if (part, step) in self._steps:
            if part in EVALUATIONS:
                written = self._metrics_of(part, step) | written
            self._rewrite(lambda old: (old["part"], old["step"]) != (part, step))
        row = {"time": round(time.time(), 3), "part": part, "step": step, "metrics": written}
        self._steps.add((part, step))
        with in_turn(self._lock):
            append(self.path, (json.dumps(row, allow_nan=False) + "\n").encode())

    def hear(self, event: Event) -> None:
        """Write the metrics of an event."""
        if (figures := measured(event)) is not None:
            self.log(*figures)

    def _metrics_of(self, part: str, step: int) -> dict[str, float | None]:
        rows = [row for row in _rows(self.path) if (row["part"], row["step"]) == (part, step)]
        return {name: value for row in rows for name, value in row["metrics"].items()}

    def _rewrite(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Replace the file by one with the wanted lines only, by renaming."""
        with in_turn(self._lock):
            rows = [row for row in _rows(self.path) if wanted(row)]
            write_jsonl(self.path, rows)
        self._steps = {(row["part"], row["step"]) for row in rows}


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl` in file order; if a step is there twice, the
    last row.
    """
    rows = {(row["part"], row["step"]): row for row in _rows(Path(path))}
    return list(rows.values())


def _rows(path: Path) -> list[dict[str, Any]]:
    return read_jsonl(path, part=str, step=int, metrics=dict)


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None

"""Monitor: writes a run's metrics to `metrics.jsonl`, step by step.

Invariants:
- `metrics.jsonl` has one whole line per step and part: `keep_until` removes the steps that a
  resumed run repeats, and a step that is repeated nevertheless replaces its line. Evaluations of
  a step share its line, since each taskset has its own names: one that is repeated replaces these.
- A step reads no line of the steps before it: during the run, each taskset of an evaluation appends
  a line with all metrics so far, which counts in place of the shorter one. Those go when the run
  ends, or when the next one opens the file.
- Two processes may write the same file: each line is appended under a lock, and neither process
  keeps the file open, since it may be replaced by a shorter one.
- A number that is not finite is written as null, never as text that JSON does not allow.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trireme.files import (
    append,
    in_turn,
    jsonl_rows,
    whole_lines,
    write_jsonl,
)
from trireme.monitor.events import Ended, Event, measured

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
        self._newest: dict[str, tuple[int, dict[str, float | None]]] = {}
        """The newest evaluation's step and metrics, by part."""
        with in_turn(self._lock):
            whole_lines(self.path)
            keys = [_key(row) for row in _rows(self.path)]
        self._steps = set(keys)
        self._has_shorter = len(keys) > len(self._steps)
        self._remove_shorter()

    def keep_until(self, steps: Mapping[str, int]) -> None:
        """Remove the lines of each named part after the given step."""
        if any(step > steps.get(part, step) for part, step in self._steps):
            self._rewrite(lambda row: row["step"] <= steps.get(row["part"], row["step"]))

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """Write a line with one write call; an earlier line of the same step is removed, but an
        evaluation's metrics of other names are kept.
        """
        written = {name: _finite(value) for name, value in metrics.items()}
        if part in EVALUATIONS:
            if (part, step) in self._steps:
                written = self._metrics_of(part, step) | written
                self._has_shorter = True
            self._newest[part] = step, written
        elif (part, step) in self._steps:
            self._rewrite(lambda old: _key(old) != (part, step))
        row = {"time": round(time.time(), 3), "part": part, "step": step, "metrics": written}
        self._steps.add((part, step))
        with in_turn(self._lock):
            append(self.path, (json.dumps(row, allow_nan=False) + "\n").encode())

    def hear(self, event: Event) -> None:
        """Write the metrics of an event."""
        if (figures := measured(event)) is not None:
            self.log(*figures)
        elif isinstance(event, Ended):
            self._remove_shorter()

    def _metrics_of(self, part: str, step: int) -> dict[str, float | None]:
        newest, metrics = self._newest.get(part, (None, {}))
        if newest == step:
            return metrics
        rows = [row for row in _rows(self.path) if _key(row) == (part, step)]
        return {name: value for row in rows for name, value in row["metrics"].items()}

    def _remove_shorter(self) -> None:
        if self._has_shorter:
            self._rewrite(lambda row: True)

    def _rewrite(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Replace the file by one with the last of each step's wanted lines, by renaming."""
        with in_turn(self._lock):
            rows = _last_of_each(row for row in _rows(self.path) if wanted(row))
            write_jsonl(self.path, rows)
        self._steps = set(map(_key, rows))
        self._has_shorter = False


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl` in file order; if a step is there twice, the
    last row.
    """
    return _last_of_each(_rows(Path(path)))


def _last_of_each(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({_key(row): row for row in rows}.values())


def _key(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["part"], row["step"]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    return (row for row, _ in jsonl_rows(path, part=str, step=int, metrics=dict))


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None

"""Monitor: where the numbers of a run go, step by step.

Invariants:
- `metrics.jsonl` has one whole line a step and part; after a resume a step may have two lines, and
  the later one holds (`read_metrics`).
- A number that is not finite is written as null, never as text that JSON does not know.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

FILE_NAME = "metrics.jsonl"


class Monitor(Protocol):
    """Takes the metrics of each step of each part."""

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """The metrics of one step; `part` is explorer, trainer or eval."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class Monitors:
    """Several monitors as one."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self.monitors = list(monitors)

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """To each in turn."""
        for monitor in self.monitors:
            monitor.log(metrics, step, part)

    def close(self) -> None:
        """Close each."""
        for monitor in self.monitors:
            monitor.close()


class JsonLinesMonitor:
    """Appends a line `{"time", "part", "step", "metrics"}` to `<folder>/metrics.jsonl`."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_half_line(self.path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """One write call a line: two processes may share the file."""
        row = {
            "time": round(time.time(), 3),
            "part": part,
            "step": step,
            "metrics": {name: _finite(value) for name, value in metrics.items()},
        }
        os.write(self._file, (json.dumps(row, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def open_monitor(folder: str | Path, monitor_type: str = "tensorboard") -> Monitors:
    """The monitors of a job: `metrics.jsonl` always, and the one that `monitor.monitor_type` names.

    Raises ValueError for a type that is not there.
    """
    if monitor_type != "tensorboard":
        raise ValueError(f"monitor.monitor_type is '{monitor_type}': expected 'tensorboard'")
    from trireme.monitor.tensorboard import TensorBoardMonitor

    return Monitors([JsonLinesMonitor(folder), TensorBoardMonitor(Path(folder) / "tensorboard")])


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl` in file order, of each (part, step) the last one only."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            row = json.loads(line)
            rows[row["part"], row["step"]] = row
    return list(rows.values())


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _drop_half_line(path: Path) -> None:
    """Cut off what a killed process left of its last line."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)

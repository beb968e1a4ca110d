"""The monitors and trackers of a run, told of steps by its stream."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.experience import Experience
from trireme.ext.trackers.trackers import TrackedRun, subscribe_trackers
from trireme.monitor.events import RolloutDone, StepDone, Stream
from trireme.monitor.monitor import JsonLinesMonitor


class Opened:
    """A stream with listeners."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        self._stream.emit(StepDone(part, step, metrics))

    def rollout(self, experience: Experience) -> None:
        self._stream.emit(RolloutDone(experience))

    def close(self, *, failed: bool = False) -> None:
        self._stream.close(failed=failed)


def open_monitor(
    run: TrackedRun | Path,
    *kinds: Any,
    keep_until: Mapping[str, int] | None = None,
    **options: Any,
) -> Opened:
    stream = Stream()
    tracked = run if isinstance(run, TrackedRun) else TrackedRun(run)
    lines = JsonLinesMonitor(tracked.folder)
    lines.keep_until(keep_until or {})
    stream.subscribe(lines)
    subscribe_trackers(stream, tracked, *kinds, keep_until=keep_until, **options)
    return Opened(stream)

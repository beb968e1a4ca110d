"""Table: the state and the figures of runs, and the settings in which they differ.

The page, `trireme list` and `trireme compare` show the same entries.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from trireme.ext.page.runs import (
    RunFolder,
    Tail,
    configuration,
    flat,
    has_summary,
    knows,
    main_start,
    note_of,
    read_starts,
    stage_of,
    warnings_of,
)
from trireme.monitor.figures import STEPS_TIMED, clock_time, pace
from trireme.monitor.monitor import EVALUATIONS
from trireme.processes import began

SILENT_S = 120.0
"""Seconds without a step after which a run of another machine counts as ended."""
STATES = ("failed", "killed", "running", "stopped", "unknown", "finished")
"""Of a run's parts the first of these is the run's."""
KINDS = {"explore": "explores", "bench": "measures", "serve": "serves"}
"""Words for runs that do not train; others are called by their algorithm."""
LOSSES = ("actor/sft_loss", "actor/dpo_loss", "actor/kto_loss", "actor/cpt_loss")
HELD_OUT = re.compile(r"(?:eval|bench)/.+/(accuracy|reward)/mean@\d+")
NAMES = ("name", "project", "group", "checkpoint_root_dir")
"""Keys that say which run it is, and in which all differ."""
SHOWN = 4
"""Settings of a run that a line of a terminal shows."""


@dataclass
class Course:
    """The figures of one run so far, from the lines of its metrics that were read."""

    step: dict[str, int] = field(default_factory=dict)
    """The last step of each part."""
    times: dict[tuple[str, Path], deque[tuple[float, int]]] = field(default_factory=dict)
    """The last steps of each part, by file: several explorers have one each."""
    logged: list[float] = field(default_factory=list)
    """The time of every line."""
    loss: float | None = None
    _rewarded: int = -1
    """The last step with a reward."""
    _rewards: dict[Path, float] = field(default_factory=dict)
    """The mean reward of that step, by file."""
    _held_out: dict[tuple[int, str], dict[Path, tuple[str, float]]] = field(default_factory=dict)
    """Measure and value of each evaluation, by file."""
    _tail: Tail = field(default_factory=Tail)

    @property
    def reward(self) -> float | None:
        """Return the reward of the last step: the mean over the explorers that have made it."""
        return fmean(self._rewards.values()) if self._rewards else None

    @property
    def best(self) -> dict[str, Any] | None:
        """Return the best held-out result, its `measure`, `value` and `step`: the mean over the
        explorers that have measured it.
        """
        best = None
        for (step, _), of_files in sorted(self._held_out.items()):
            measure = min(measure for measure, _ in of_files.values())
            value = fmean(value for name, value in of_files.values() if name == measure)
            if best is None or value > best["value"]:
                best = {"measure": measure, "value": value, "step": step}
        return best

    def read(self, run: RunFolder) -> None:
        """Read what the run has logged since; all of it, if a file was replaced."""
        for path in run.metric_files:
            rows = self._tail.rows(path)
            if rows is None:
                self.__init__()
                return self.read(run)
            for row in rows:
                self._add(row, path)

    def _add(self, row: Mapping[str, Any], path: Path) -> None:
        part, step, when, metrics = row["part"], row["step"], row["time"], row["metrics"]
        self.logged.append(when)
        self.step[part] = max(step, self.step.get(part, 0))
        self.times.setdefault((part, path), deque(maxlen=STEPS_TIMED)).append((when, step))
        reward = metrics.get("rollout/reward/mean")
        if reward is not None and step >= self._rewarded:
            others = self._rewards if step == self._rewarded else {}
            self._rewarded, self._rewards = step, {**others, path: reward}
        for name in LOSSES:
            self.loss = self.loss if metrics.get(name) is None else metrics[name]
        if part in EVALUATIONS:
            found = [(m[1], metrics[name]) for name in metrics if (m := HELD_OUT.fullmatch(name))]
            measured = next((one for one in sorted(found, key=lambda one: one[0])), None)
            if measured is not None and measured[1] is not None:
                self._held_out.setdefault((step, part), {})[path] = measured


class Entries:
    """The entries of runs, each read on from where the last call ended."""

    def __init__(self) -> None:
        self._courses: dict[Path, Course] = {}
        self._settings: tuple[Any, list[dict[str, Any]]] = (None, [])

    def of(self, runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
        """Return an entry for each run that can be read, with the settings in which they differ."""
        out = []
        for run in runs:
            try:
                out.append((run, self.entry(run)))
            except (OSError, ValueError):  # deleted since it was found, not ours to read, damaged
                continue
        there = [run for run, _ in out]
        starts = [
            (run.folder, run.starts.stat().st_mtime_ns if run.has_starts else 0) for run in there
        ]
        if self._settings[0] != starts:  # it takes a hundredth of a second a run
            self._settings = starts, differing(there)
        for (_, entry), settings in zip(out, self._settings[1], strict=True):
            entry["settings"] = settings
        return [entry for _, entry in out]

    def entry(self, run: RunFolder) -> dict[str, Any]:
        """Return what is known of one run. Raises OSError if a file of it cannot be read, and
        ValueError for a damaged one.
        """
        course = self._courses.setdefault(run.folder, Course())
        course.read(run)
        starts = read_starts(run)
        main = main_start(starts)
        state, error = state_of(run, starts)
        code, note = main.get("code") or {}, note_of(run)
        progress = _progress(course, main, running=_state(run, main)[0] == "running")
        return {
            "name": run.name,
            "folder": str(run.folder),
            "generation": run.generation,
            "updated": run.updated,
            "mode": main.get("mode"),
            "kind": _kind(run, main),
            "seed": main.get("seed"),
            "started": main.get("time"),
            "state": state,
            "error": error,
            "finished": state == "finished",
            "warnings": warnings_of(run),
            **progress,
            "reward": course.reward,
            "loss": course.loss,
            "best": course.best,
            "seconds": _seconds(run, course, starts, state),
            "commit": code.get("folder") or code.get("trireme"),
            "note": note["text"],
            "hidden": note["hidden"],
        }


def state_of(run: RunFolder, starts: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return a run's state, and the sentence of its error with the place below it."""
    newest = {(start.get("mode"), start.get("name")): start for start in starts}
    states = [_state(run, start) for start in newest.values()] or [_state(run, {})]
    return min(states, key=lambda state: STATES.index(state[0]))


def _state(run: RunFolder, start: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state of the part that a start began."""
    if end := start.get("end"):
        return end["how"], end["error"]
    if "process" in start and start.get("host") == socket.gethostname():
        return ("running" if _lives(start) else "killed"), ""
    if stage_of(run) is not None or has_summary(run, start):
        return "finished", ""
    return ("running" if time.time() - run.updated < SILENT_S else "unknown"), ""


def _lives(start: Mapping[str, Any]) -> bool:
    """Return whether the process of a start lives: not one that has its number now."""
    process = start["process"]
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    if not began(os.getpid()):  # this machine does not tell
        return True
    now = began(process)
    return bool(now) and start.get("process_began", now) == now


def _kind(run: RunFolder, start: Mapping[str, Any]) -> str | None:
    if start.get("mode") in KINDS:
        return KINDS[start["mode"]]
    return (configuration(run, start).get("algorithm") or {}).get("algorithm_type")


def _progress(course: Course, start: Mapping[str, Any], *, running: bool) -> dict[str, Any]:
    """Return the step, the number of steps, and the seconds that are left; None if unknown."""
    counted = start.get("steps") or {}
    part, total = counted.get("by"), counted.get("total")
    if start.get("mode") in ("bench", "serve"):
        return {"step": max(course.step.values(), default=0), "total": None, "left": None}
    began = _seconds_of(start["time"]) if "time" in start else 0.0
    of_part = [times for (name, _), times in course.times.items() if name == part]
    newest = max(of_part, key=lambda times: times[-1], default=())
    times = [one for one in newest if one[0] >= began]
    known = [course.step.get(name, 0) for name in ([part] if part else ("explorer", "trainer"))]
    return {"step": max(known), "total": total, "left": pace(times, total)[1] if running else None}


def _seconds(
    run: RunFolder, course: Course, starts: Sequence[Mapping[str, Any]], state: str
) -> float | None:
    """Return the seconds of all attempts; of several parts the longest.

    An attempt that was killed lasted until the last line before the next one.
    """
    parts: dict[Any, list[Mapping[str, Any]]] = {}
    for start in starts:
        parts.setdefault((start.get("mode"), start.get("name")), []).append(start)
    sums = []
    for attempts in parts.values():
        seconds = 0.0
        for start, following in zip_longest(attempts, attempts[1:]):
            began, end = _seconds_of(start["time"]), start.get("end")
            until = _seconds_of(end["time"]) if end else run.updated
            if not end and following is not None:
                later = _seconds_of(following["time"])
                until = max((when for when in course.logged if when < later), default=began)
            elif not end and state == "running" and start is starts[-1]:
                until = time.time()
            seconds += max(until - began, 0.0)
        sums.append(seconds)
    if sums:
        return max(sums)
    return run.updated - min(course.logged) if course.logged else None


def _seconds_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def differing(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return, for each run, the values of the settings in which runs of its kind differ, those
    first that the fewest share, by the shortest ends of the keys that name one alone.

    Runs that explore are of one kind, whatever their algorithm; runs that learn from a data set
    are of one kind if their algorithm is the same.
    """
    flats, kinds = [], []
    for run in runs:
        start = main_start(read_starts(run))
        config, job = configuration(run, start), str(run.folder.parent)
        values = {
            key: value.replace(job, "…") if isinstance(value, str) else value
            for key, value in flat(config).items()
            if key not in NAMES
        }
        flats.append(values)
        mode = start.get("mode")
        kinds.append((mode, values.get("algorithm.algorithm_type") if mode == "train" else None))
    out = []
    for values, kind in zip(flats, kinds, strict=True):
        alike = [other for other, k in zip(flats, kinds, strict=True) if k == kind and other]
        shared = {
            key: sum(one.get(key) == value or not knows(one, key) for one in alike)
            for key, value in values.items()
        }
        keys = [key for key in values if shared[key] < len(alike)]
        out.append({_end(key, keys): values[key] for key in sorted(keys, key=shared.__getitem__)})
    return out


def _end(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    for first in range(len(parts) - 1, 0, -1):
        end = ".".join(parts[first:])
        if sum(one == end or one.endswith(f".{end}") for one in keys) == 1:
            return end
    return key


def text_of(value: Any) -> str:
    """Return the value of a setting in a table."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def finds(entry: Mapping[str, Any], text: str) -> bool:
    """Return whether each word of a text occurs in a run's name, state, kind, note or settings, in
    any case. The page does the same (`static/table.js`).
    """
    settings = [f"{key}={text_of(value)}" for key, value in entry["settings"].items()]
    said = "\n".join(
        [entry["name"], entry["state"], entry["kind"] or "", entry["note"], *settings]
    ).lower()
    return all(word in said for word in text.lower().split())


HEADINGS = ("run", "state", "steps", "reward", "best held-out", "time", "code", "settings", "note")


def lines(entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each entry, for a terminal."""
    for entry in entries:
        total, best = entry["total"], entry["best"]
        reward = "" if entry["reward"] is None else f"{entry['reward']:.3f}"
        if not reward and entry["loss"] is not None:
            reward = f"loss {entry['loss']:.3g}"
        left = "" if entry["left"] is None else f", left {clock_time(entry['left'])}"
        settings = [f"{key}={text_of(value)}" for key, value in entry["settings"].items()]
        more = f" and {len(settings) - SHOWN} more" if len(settings) > SHOWN else ""
        yield (
            entry["name"],
            entry["state"],
            f"{entry['step']}" + (f" of {total}" if total else "") + left,
            reward,
            "" if best is None else f"{_measured(best)} at step {best['step']}",
            "" if entry["seconds"] is None else clock_time(entry["seconds"]),
            short_commit(entry["commit"]),
            "  ".join(settings[:SHOWN]) + more,
            " ".join(entry["note"].split()),
        )


def short_commit(commit: str | None) -> str:
    """Return the beginning of a commit, with a + if files differed from it."""
    return "" if not commit else commit[:8] + "+" * commit.endswith("+")


def _measured(best: Mapping[str, Any]) -> str:
    return f"{best['value']:.1%}" if best["measure"] == "accuracy" else f"{best['value']:.3f}"

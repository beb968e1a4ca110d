"""Runs: finds runs below a folder and reads their metrics and configuration.

Invariants:
- A run is a folder with `monitor/metrics.jsonl`, or with one in `monitor/<explorer>/`, or with a
  record of its starts, `run/starts.json`. A run of several stages has a folder, and so an entry
  here, for each stage.
- Reading never writes, takes no lock, and imports no torch: it may happen during a run. A reader's
  note is the only file that is written, and no run reads it.
- Curves are columns. A step of several explorers, each with its file, is merged: sums of counts,
  means of the rest. A part with more than `MOST_POINTS` steps is thinned evenly; its last step
  always remains.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from trireme.files import open_regular, write_json
from trireme.monitor import figures
from trireme.monitor.figures import metric_of
from trireme.monitor.monitor import FILE_NAME

_logger = logging.getLogger(__name__)

HEAD = 200
"""Bytes of a file of metrics that tell it from another."""
MOST_NOTE = 2000
"""Characters of a note."""
DEPTH = 5
"""Most levels below the given folder at which runs are found."""
MOST_POINTS = 2000
SUMS = re.compile(
    r"rollout/(tasks|runs|experiences|failed(/.*)?|retries|dropped_\w+)|perf/tokens_per_s"
    r"|experience_pipeline/(made|kept|not_finite|emptied_groups|\w+_count)"
)
"""Metrics of a step that are sums over several explorers; others are means."""
_SKIPPED = {"node_modules"}
_PARTS = {"buffer", "log", "monitor", "run"}
"""Folders in a run's own, which contain no other run; elsewhere a run may have such a name."""


@dataclass(frozen=True)
class RunFolder:
    """One run's folder, or one stage's."""

    name: str
    """Its path below the viewed folder, which the page shows and uses in requests."""
    folder: Path

    @property
    def metric_files(self) -> list[Path]:
        """Return one file per process that logs."""
        monitor = self.folder / "monitor"
        return sorted([*monitor.glob(FILE_NAME), *monitor.glob(f"*/{FILE_NAME}")])

    @property
    def starts(self) -> Path:
        """Return the record of its starts, which may not exist."""
        return self.folder / "run" / "starts.json"

    @property
    def note(self) -> Path:
        """Return the file of a reader's note, which may not exist."""
        return self.folder / "run" / "note.json"

    @property
    def has_starts(self) -> bool:
        """Return whether there is a record of its starts."""
        return self.starts.is_file()

    @property
    def files(self) -> list[Path]:
        """Return the files that say that this is a run."""
        return [*self.metric_files, *([self.starts] if self.has_starts else [])]

    @property
    def generation(self) -> str:
        """Return a text that changes whenever the run logs something, starts or ends."""
        stats = (path.stat() for path in self.files)
        return ",".join(f"{stat.st_ino}-{stat.st_size}" for stat in stats)

    @property
    def updated(self) -> float:
        """Return the time of its last line."""
        files = self.metric_files or self.files
        return max((path.stat().st_mtime for path in files), default=0.0)


def find_runs(root: Path) -> list[RunFolder]:
    """Find every run at or below `root`, in the order in which each began to log.

    Raises ValueError if there are none.
    """
    if not root.is_dir():
        raise ValueError(
            f"there is no folder {root}: expected a run's folder, or one that contains runs"
            f"{near_run(str(root))}"
        )
    if not os.access(root, os.R_OK | os.X_OK):
        raise ValueError(f"{root} cannot be read: expected a folder that this user may read")
    folders = list(_folders(root.resolve(), DEPTH))
    if not folders:
        raise ValueError(f"{root} contains no run: expected monitor/{FILE_NAME} in it or below it")
    base = root.resolve()
    runs = [RunFolder(str(f.relative_to(base)) if f != base else base.name, f) for f in folders]
    return sorted(runs, key=_began)


def near_run(name: str) -> str:
    """Suggest the folder of a run below ./checkpoints for a name that was given in its place; '' if
    none has it.
    """
    for folder in _folders(Path("checkpoints"), DEPTH):
        if name in folder.parts[1:]:
            return f"; did you mean {Path(*folder.parts[: folder.parts.index(name, 1) + 1])}?"
    return ""


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        skipped = _SKIPPED
        if RunFolder("", folder).files:
            yield folder
            skipped = _SKIPPED | _PARTS
        below = _below(folder, skipped) if depth else []
    except OSError:  # unreadable, or deleted meanwhile: the other runs are shown
        return
    for name in below:
        yield from _folders(folder / name, depth - 1)


def _below(folder: Path, skipped: Collection[str]) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False)
            and entry.name not in skipped
            and not entry.name.startswith((".", "global_step_"))
        )


def _began(run: RunFolder) -> tuple[float, str]:
    """Return the time of the run's first step, from the first line of its metrics; else of its
    record of starts. A damaged line has none.
    """
    times = []
    for path in run.metric_files:
        try:
            with path.open("rb") as file:
                line = file.readline()
        except OSError:  # a request for this run's curves reports it
            continue
        if line.endswith(b"\n") and (row := _row(line)) is not None:
            times.append(float(row["time"]))
    return min(times, default=run.updated or math.inf), run.name


class Tail:
    """Reads the rows that files of metrics have got since they were last read."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[int, bytes, int]] = {}
        """The inode of each file, its beginning (a file that was made again may have the same
        inode, but not the same time in its first line), and how far it was read.
        """

    def rows(self, path: Path) -> list[dict[str, Any]] | None:
        """Return the rows of the whole lines since the last time; None if the file was replaced,
        which the reader of all files then does anew.

        A damaged line is passed by, with a warning.
        """
        rows = []
        with open(open_regular(path), "rb") as file:
            stat, head = os.fstat(file.fileno()), file.read(HEAD)
            inode, known, at = self._read.get(path, (stat.st_ino, b"", 0))
            if inode != stat.st_ino or not head.startswith(known) or stat.st_size < at:
                return None
            file.seek(at)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                at += len(line)
                if (row := _row(line)) is not None:
                    rows.append(row)
                else:
                    _say_passed_by(path)
        self._read[path] = stat.st_ino, head[:at], at
        return rows


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = {"part": str, "step": int, "metrics": dict, "time": (int, float)}
    known = isinstance(row, dict) and all(isinstance(row.get(k), v) for k, v in kinds.items())
    return row if known else None


@lru_cache(maxsize=256)  # once for each file
def _say_passed_by(path: Path) -> None:
    _logger.warning("%s has damaged lines: passed by", path)


class _Part:
    """The metrics of one part of a run as columns, which grow with each row."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.times: list[float] = []
        self.metrics: dict[str, list[float | None]] = {}
        """A column ends with its last value."""
        self._places: dict[int, int] = {}
        self._rows: dict[int, dict[Path, Mapping[str, float | None]]] = {}
        """The metrics of each step by file, if there are several."""

    def add(self, row: Mapping[str, Any], path: Path | None = None) -> None:
        """Add a row; one of a step that is there replaces its values, and one from the `path` of
        another explorer is merged with them.
        """
        metrics = row["metrics"]
        if path is not None:
            of_step = self._rows.setdefault(row["step"], {})
            of_step[path] = metrics
            metrics = _merged([*of_step.values()])
        place = self._places.get(row["step"])
        if place is None:
            place = self._insert(row["step"])
        self.times[place] = max(self.times[place], row["time"])
        for name, value in metrics.items():
            column = self.metrics.setdefault(name, [])
            column.extend([None] * (place + 1 - len(column)))
            column[place] = _short(value)

    def _insert(self, step: int) -> int:
        place = bisect(self.steps, step)
        self.steps.insert(place, step)
        self.times.insert(place, 0.0)
        if place == len(self.steps) - 1:
            self._places[step] = place
        else:  # another process was ahead
            for column in self.metrics.values():
                column[place:place] = [None] * (place < len(column))
            self._places = {step: place for place, step in enumerate(self.steps)}
        return place

    def thinned(self) -> dict[str, Any]:
        """Return the columns of at most `MOST_POINTS` steps, the last one among them."""
        stride = math.ceil(len(self.steps) / MOST_POINTS)
        some = slice((len(self.steps) - 1) % stride, None, stride)
        steps = self.steps[some]
        metrics = {name: self.metrics[name][some] for name in sorted(self.metrics)}
        for column in metrics.values():
            column.extend([None] * (len(steps) - len(column)))
        return {"steps": steps, "times": self.times[some], "metrics": metrics}


def _merged(rows: Sequence[Mapping[str, float | None]]) -> Mapping[str, float | None]:
    """Return the metrics of a step that several explorers have made, each its own share."""
    if len(rows) == 1:
        return rows[0]
    merged: dict[str, float | None] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        numbers = [value for row in rows if (value := row.get(name)) is not None]
        combine = {"min": min, "max": max}.get(re.split("[/_]", name)[-1])
        combine = sum if SUMS.fullmatch(name) else combine or fmean
        merged[name] = combine(numbers) if numbers else None
    return merged


class _Read:
    """What was read of a run's metrics, and the columns made of it."""

    def __init__(self) -> None:
        self._tail = Tail()
        self._parts: dict[str, _Part] = {}
        self._several = False
        """Whether several processes log, each to its file."""
        self.generation = ""
        self.columns: dict[str, Any] = {}

    def read_on(self, run: RunFolder, generation: str) -> None:
        """Add what the run has logged since; all of it, if a file was replaced."""
        paths = run.metric_files
        if self._several != (len(paths) > 1):
            self.__init__()
            self._several = len(paths) > 1
        for path in paths:
            rows = self._tail.rows(path)
            if rows is None:
                self.__init__()
                return self.read_on(run, generation)
            for row in rows:
                part = self._parts.setdefault(row["part"], _Part())
                part.add(row, path if self._several else None)
        self.generation = generation
        self.columns = {name: part.thinned() for name, part in self._parts.items()}


class Curves:
    """The metrics of runs as columns, read on if a file has grown."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[str, _Read] = {}

    def of(self, run: RunFolder) -> dict[str, Any]:
        """Return `{part: {steps, times, metrics: {name: values}}}`; null where a step lacks a
        metric.
        """
        generation = run.generation
        with self._lock:
            read = self._read.setdefault(run.name, _Read())
            if read.generation != generation:
                read.read_on(run, generation)
            return read.columns


def _short(value: float | None) -> float | None:
    """Round to six digits, which are more than a curve shows."""
    return None if value is None else float(f"{value:.6g}")


def meanings(curves: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the meanings of the metrics in a run's curves, as far as they are known."""
    names = {name for part in curves.values() for name in part["metrics"]}
    known = {name: metric for name in names if (metric := metric_of(name)) is not None}
    return {
        name: {
            "section": m.section,
            "meaning": m.meaning,
            "healthy": m.healthy,
            "otherwise": m.otherwise,
        }
        for name, m in known.items()
    }


def warnings_of(run: RunFolder) -> list[dict[str, Any]]:
    """Return the watchdog's warnings, each cause once."""
    paths = sorted((run.folder / "monitor").glob("**/watchdog*.json"))
    return [warning for path in paths for warning in _read(path, [])]


def stage_of(run: RunFolder) -> dict[str, Any] | None:
    """Return the run's figures in its job's summary, once its stage has ended."""
    meta = _of_job(run, "stage_meta.json") or {}
    return next((s for s in meta.get("finished", []) if s["name"] in (run.folder.name, None)), None)


def has_summary(run: RunFolder, start: Mapping[str, Any]) -> bool:
    """Return whether a start's command of one stage has ended, in a run without a record of starts
    any: its summary is written last, and a resume logs on.
    """
    written = [path.stat().st_mtime_ns for path in _summaries(run, start)]
    return bool(written) and max(written) >= max(path.stat().st_mtime_ns for path in run.files)


def _summaries(run: RunFolder, start: Mapping[str, Any] | None = None) -> list[Path]:
    """Return the summary of a start's command, or of all, first of the command that trains: other
    commands have theirs in `monitor/`.
    """
    monitor = run.folder / "monitor"
    match start:
        case {"mode": "both" | "train"}:
            places = [run.folder]
        case {"mode": "explore", "name": str(name)}:
            places = [monitor / name]
        case {"mode": str(mode)}:
            places = [monitor / mode]
        case _:
            places = [run.folder, monitor, *sorted(monitor.glob("*"))]
    return [path for place in places if (path := place / figures.FILE_NAME).is_file()]


def starts_of(run: RunFolder) -> list[dict[str, Any]]:
    """Return each attempt with its configuration, and its differences from the one before."""
    starts = read_starts(run)
    before: dict[str, dict[str, Any]] = {}
    for start in starts:
        text = (run.folder / "run" / start["config_file"]).read_text(encoding="utf-8")
        start["config_text"], start["config"] = text, configuration(run, start)
        who = f"{start['mode']} {start['name']}"
        start["changes"] = differences(before[who], start) if who in before else []
        before[who] = start
    return starts


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return keys of configuration, versions, data and code whose values differ between two
    attempts. A setting that an older release did not have is no difference.
    """
    out: list[dict[str, Any]] = []
    for section in ("config", "versions", "code", "plugins", "model", "data"):
        left, right = flat(old.get(section), section), flat(new.get(section), section)
        for key in sorted({*left, *right}):
            was_known = section != "config" or (knows(left, key) and knows(right, key))
            if was_known and left.get(key) != right.get(key):
                name = key.removeprefix("config.")
                out.append({"key": name, "old": left.get(key), "new": right.get(key)})
    return out


def knows(settings: Mapping[str, Any], key: str) -> bool:
    """Return whether flat settings have a key, or a value where others have a section: `lora: null`
    in place of `lora.rank`. An older release may have neither.
    """
    above = [key[: sign.start()] for sign in re.finditer(r"[.\[]", key)]
    below = (f"{key}.", f"{key}[")
    return any(part in settings for part in (key, *above)) or any(
        other.startswith(below) for other in settings
    )


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return the leaves of nested sections by their full names; lists of plain values are
    leaves.
    """
    if isinstance(value, Mapping) and value:
        dot = f"{key}." if key else ""
        parts = (flat(inner, f"{dot}{name}") for name, inner in value.items())
        return {k: v for part in parts for k, v in part.items()}
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        parts = (flat(item, f"{key}[{index}]") for index, item in enumerate(value))
        return {k: v for part in parts for k, v in part.items()}
    return {key: value} if key else {}


def compared(one: RunFolder, other: RunFolder) -> list[dict[str, Any]]:
    """Return the differences between the main starts of two runs, other than their names; see
    `differences`.
    """
    starts = [main_start(starts_of(run)) for run in (one, other)]
    return [change for change in differences(*starts) if change["key"] != "name"]


def main_start(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the start that says what a run is: the newest of the command that trains, else of one
    that explores or serves for it, else of one that measures; empty without any.
    """
    ranks = {"bench": 0, "explore": 1, "serve": 1}
    return max(reversed(starts), key=lambda start: ranks.get(str(start.get("mode")), 2), default={})


def note_of(run: RunFolder) -> dict[str, Any]:
    """Return a reader's note on a run, and whether lists leave the run out."""
    try:
        note = _read(run.note, {})
    except (OSError, ValueError):  # damaged: a new note replaces it
        note = {}
    return {"text": str(note.get("text", "")), "hidden": note.get("hidden") is True}


def write_note(run: RunFolder, text: str, *, hidden: bool) -> None:
    """Replace a run's note. Raises ValueError for one that is too long."""
    if len(text) > MOST_NOTE:
        raise ValueError(f"a note has {len(text):,} characters: expected at most {MOST_NOTE:,}")
    run.note.parent.mkdir(exist_ok=True)
    write_json(run.note, {"text": text, "hidden": hidden})


def about(run: RunFolder) -> dict[str, Any]:
    """Return a run's provenance: its starts, its stage's end, and the summary of its job."""
    summary = _of_job(run, figures.FILE_NAME)
    if summary is None:
        summary = next((_read(path) for path in _summaries(run)), None)
    return {"starts": starts_of(run), "stage": stage_of(run), "summary": summary}


def _read(path: Path, otherwise: Any = None) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else otherwise


def read_starts(run: RunFolder) -> list[dict[str, Any]]:
    """Return the record of each attempt, without its configuration."""
    return _read(run.starts, {"starts": []})["starts"]


def configuration(run: RunFolder, start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an attempt; empty if it has no record."""
    path = run.folder / "run" / str(start.get("config_file", ""))
    return _parsed(path, path.stat().st_mtime_ns) if path.is_file() else {}


@lru_cache(maxsize=512)
def _parsed(path: Path, written: int) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


def _of_job(run: RunFolder, name: str) -> dict[str, Any] | None:
    """Return a file in the run's folder, or in its job's, of which the run is a stage."""
    own = run.folder / name
    return _read(own if own.exists() else run.folder.parent / name)

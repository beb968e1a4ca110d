"""`trireme log`: shows the log files of a run, merged by time and filtered."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from trireme.log import LEVELS
from trireme.monitor.terminal import Terminal
from trireme.text import say

_HEAD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ([A-Z]+) ")
_STYLES = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


@dataclass(frozen=True, order=True)
class LogLine:
    """A log record: a line, and the lines after it up to the next one (a traceback)."""

    time: str
    part: str
    place: int
    level: str
    text: str


def log(
    log_dir: Path | None,
    config: Path | None,
    *,
    keyword: str = "",
    level: str = "DEBUG",
    last: int = 0,
    pattern: str = "*",
    color: bool = True,
) -> int:
    """Print the requested entries; returns the exit code."""
    try:
        folders = _folders(log_dir, config)
        entries = select(folders, keyword=keyword, level=level, pattern=pattern)
    except ValueError as error:
        say(error, file=sys.stderr)
        return 2
    output = Terminal(no_color=not color, highlight=False)
    lines = [(line, entry.level) for entry in entries for line in entry.text.split("\n")]
    for line, level in lines[-last:] if last else lines:
        output.print(Text(line, style=_STYLES.get(level, "")), soft_wrap=True)
    return 0


def select(
    folders: list[Path], *, keyword: str = "", level: str = "DEBUG", pattern: str = "*"
) -> list[LogLine]:
    """Return the entries of the files that match, with the keyword, at or above the level, by time.

    Raises ValueError for an unknown level, a folder without logs, or a pattern that matches none.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"--level is '{level}': expected one of {', '.join(LEVELS)}")
    files = [file for folder in folders for file in sorted(folder.glob("*.log"))]
    if not files:
        raise ValueError(f"no log files in {', '.join(map(str, folders))}")
    chosen = [file for file in files if file.match(pattern) or file.match(f"{pattern}.log")]
    if not chosen:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"--pattern '{pattern}' matches none of {names}")
    lowest = LEVELS.index(level.upper())
    return sorted(
        entry
        for file in chosen
        for entry in read_entries(file)
        if keyword in entry.text and _rank(entry.level) >= lowest
    )


def read_entries(file: Path) -> Iterator[LogLine]:
    """Yield the records of one file; lines without a time belong to the record before them."""
    time, level, lines, number = "", "", [], 0
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        head = _HEAD.match(line)
        if head:
            if lines:
                yield LogLine(time, file.stem, number, level, "\n".join(lines))
            (time, level), lines, number = head.groups(), [], number + 1
        lines.append(line)
    if lines:
        yield LogLine(time, file.stem, number, level, "\n".join(lines))


def _rank(level: str) -> int:
    """Return a level's rank; lines without a level are always shown."""
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


def _folders(log_dir: Path | None, config: Path | None) -> list[Path]:
    """Return the log folders of a job (given, or by its YAML), including those of its stages."""
    if (log_dir is None) == (config is None):
        raise ValueError("trireme log needs a job's folder or --config")
    if config is not None:
        from trireme.config import load_config
        from trireme.config.check import job_folder
        from trireme.config.stages import stages_of

        read = load_config(config)
        jobs = [job_folder(read) / (stage.name or "") for stage in stages_of(read)]
    else:
        assert log_dir is not None
        if not log_dir.is_dir():
            from trireme.config.lookup import near_path

            raise ValueError(f"there is no folder {log_dir}: expected a job's{near_path(log_dir)}")
        jobs = [log_dir]
    places = ("log", "log/*", "*/log", "*/log/*")  # stages, and explorers with names
    logs = [
        *jobs,
        *(folder for job in jobs for pattern in places for folder in sorted(job.glob(pattern))),
    ]
    return [folder for folder in logs if any(folder.glob("*.log"))] or jobs

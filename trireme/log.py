"""Log: sets up the log file of each part of a run, and the lines that the console shows.

Invariants:
- One file a part in the job's `log` folder, appended to: `explorer.log`, `explorer_runner_N.log`,
  `trainer.log`, `synchronizer.log`, `checkpoint_monitor.log`, `explorer_experience_pipeline.log`,
  `queue_experience_buffer.log`; all other records are in `launcher.log`.
- A part's file is created with its first line: there are no empty ones.
- The console shows the first line of warnings and errors (all lines of a record that is `whole`);
  tracebacks are in the files alone.
- A message that repeats is shown a few times only; the file has them all.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import IO

from trireme.files import append, append_to, for_appending
from trireme.text import hide_passwords, say, shown

ROOT = "trireme"
PARTS = (
    "explorer",
    "trainer",
    "synchronizer",
    "checkpoint_monitor",
    "explorer_experience_pipeline",
    "queue_experience_buffer",
)
ELSEWHERE = "launcher"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
SHOWN_REPEATS = 3
FILE_ONLY = {"file_only": True}
"""The `extra` of a record that a file gets and the console shows in another way."""

# Modules log under their own name, `trireme.<package>…`: the part that each package belongs to.
_PART_OF_PACKAGE = {
    "sync": "synchronizer",
    "checkpoint": "checkpoint_monitor",
    "pipeline": "explorer_experience_pipeline",
    "buffer": "queue_experience_buffer",
}


def get_logger(part: str = "plugin") -> logging.Logger:
    """Return the logger of a part: `explorer`, `explorer_runner_3`, `trainer` …; or of a user's
    file.
    """
    return logging.getLogger(f"{ROOT}.{part}")


def setup_logging(job_log_dir: str | Path, level: str) -> Callable[[], None]:
    """Begin to log into `job_log_dir`; returns the function that ends it and closes the files.

    A part's file is created with its first line. Raises ValueError for an unknown level, OSError if
    the folder cannot be written.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"log.level is '{level}': expected one of {', '.join(LEVELS)}")
    folder = Path(job_log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    files = PartFiles(folder)
    console = ConsoleLines(folder)
    root = logging.getLogger(ROOT)
    before = root.level
    root.setLevel(level.upper())
    root.addHandler(files)
    root.addHandler(console)

    def close() -> None:
        root.removeHandler(files)
        root.removeHandler(console)
        root.setLevel(before)
        files.close()

    return close


@lru_cache(maxsize=1024)
def part_of(logger_name: str) -> str:
    """Return the part whose file a logger writes to: `trireme.sync.probe` -> `synchronizer`."""
    name = logger_name.removeprefix(f"{ROOT}.").split(".")[0]
    name = _PART_OF_PACKAGE.get(name, name)
    return name if name in PARTS or name.startswith("explorer_runner_") else ELSEWHERE


def write_failure(job_log_dir: str | Path, error: BaseException) -> Path | None:
    """Append the traceback of the error that ended a run to `error.log`; None if it cannot be
    written.
    """
    path = Path(job_log_dir) / "error.log"
    trace = (type(error), error, error.__traceback__)
    record = logging.LogRecord(
        f"{ROOT}.{ELSEWHERE}", logging.ERROR, __file__, 0, "the run failed", (), trace
    )
    if of_rollout := getattr(error, "trace", ""):  # the traceback of user code
        record.msg = f"the run failed; the first rollout that did:\n{of_rollout.rstrip()}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append(path, (Lines(LINE).format(record) + "\n").encode("utf-8", "backslashreplace"))
    except OSError:  # the disk may be the cause
        return None
    return path


class Lines(logging.Formatter):
    """Formats a log record in one or more lines: no password, no control character."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, made safe to show, with passwords hidden."""
        return shown(hide_passwords(super().format(record)))


class PartFiles(logging.Handler):
    """Writes each record into the file of the part that logged it. A record that cannot be written
    is lost, which a sentence says once: whoever logs it, in whatever thread, goes on.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._lost = False
        self.setFormatter(Lines(LINE))

    def file_of(self, part: str) -> IO[bytes]:
        """Return the open file of a part."""
        if part not in self._files:
            opened = for_appending(self._path(part))
            self._files.setdefault(part, opened)  # a warning in between may have opened it
        return self._files[part]

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.log"

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, whole."""
        part = part_of(record.name)
        line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        try:
            append_to(self.file_of(part), self._path(part), line)
        except OSError as error:
            if not self._lost:
                self._lost = True
                say(f"warning: {error}: the logs lack lines from now on", file=sys.stderr)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        super().close()


def on_stderr(text: str) -> None:
    """Show a line on stderr, which is looked up each time: a live display replaces it."""
    say(text, file=sys.stderr)


class ConsoleLines(logging.Handler):
    """Shows warnings and errors, one line each."""

    def __init__(self, folder: Path, show: Callable[[str], None] = on_stderr) -> None:
        super().__init__(logging.WARNING)
        self.folder = folder
        self._show = show
        self._seen: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Show the first line, and after some repeats say where the others are."""
        if getattr(record, "file_only", False):
            return
        part = part_of(record.name)
        kind = (part, str(record.msg))
        self._seen[kind] += 1
        if self._seen[kind] > SHOWN_REPEATS:
            return
        lines = hide_passwords(record.getMessage()).splitlines() or [""]
        line = "\n".join(lines if getattr(record, "whole", False) else lines[:1])
        more = ""
        if where := getattr(record, "place", ""):  # the place in user code
            more = f"\n  {where}\ndetails: {self.folder / f'{part}.log'}"
        elif self._seen[kind] == SHOWN_REPEATS:
            more = f" (more of these: {self.folder / f'{part}.log'})"
        self._show(f"{record.levelname.lower()}: {line}{more}")

"""Processes: sets the environment of user code while it explores, and ends the processes it leaves.

- Variables are set for the block that explores, and restored after it: engines and ranks, which
  start before it, and the next stage do not see them.
- Processes started meanwhile inherit a mark, whoever their parent is later; a fork that starts no
  program registers itself. At the end, however it happens, those that still run are ended and
  named.
- A process without the mark is never touched: one of another shell, an older server, a
  cluster's daemon. Nor is a helper of ours or of Python's, which ends with its parent.
- Only Linux shows the environment of a process; elsewhere nothing is done.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from trireme.text import shown

MARK = "TRIREME_ROLLOUTS"
"""The variable that processes inherit."""
GRACE_S = 2.0
"""Seconds in which they may end by themselves after SIGTERM."""
_SHOWN = 5
_OURS = (
    *("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker"),
    *("-m trireme.", str(Path(__file__).parent)),
)
"""Parts of command lines of helpers, which end with their parents."""
_open: list[Leftovers] = []


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def ending_leftovers(note: Callable[[str], None]) -> Iterator[None]:
    """End the processes that the block has started and left running; `note` receives their
    descriptions.
    """
    left = Leftovers()
    with environment({MARK: left.token}):
        _open.append(left)
        try:
            yield
        finally:
            _open.remove(left)
            if ended := left.end():
                several = "es" * (len(ended) > 1)
                more = f" and {len(ended) - _SHOWN} more" * (len(ended) > _SHOWN)
                note(
                    f"ended {len(ended)} process{several} that rollouts had left running: "
                    f"{', '.join(ended[:_SHOWN])}{more}"
                )


def end_now() -> None:
    """End all processes that user code has started, at once: this process is about to end without
    leaving its block.

    It waits for nothing.
    """
    for left in _open:
        with suppress(Exception):
            left.kill(signal.SIGKILL)


class Leftovers:
    """The processes that were started since this object was made, by its mark."""

    def __init__(self) -> None:
        self.token = f"{os.getpid()}-{time.monotonic_ns()}"
        _note_forks()

    def end(self) -> list[str]:
        """End them, by force those that do not in `GRACE_S`; returns a description of each."""
        names = {process: _described(process[0]) for process in self.running()}
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + GRACE_S
            self.kill(number)
            while (still := self.running()) and time.monotonic() < deadline:
                names |= {process: _described(process[0]) for process in still - names.keys()}
                time.sleep(0.02)
        return [names[process] for process in sorted(names)]

    def kill(self, number: signal.Signals) -> None:
        """Send all of them a signal."""
        for pid, _ in self.running():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def running(self) -> set[tuple[int, str]]:
        """Find the running processes: their numbers, and when each began, since numbers are
        reused.
        """
        mark, forks = f"{MARK}={self.token}".encode(), _forks()
        found = set[tuple[int, str]]()
        for name in os.listdir("/proc") if Path("/proc/self/environ").exists() else ():
            if not name.isdigit() or int(name) == os.getpid():
                continue
            process = int(name), began(int(name))
            marked = mark in _read(int(name), "environ").split(b"\0")
            ours = marked and any(one in _command(int(name)) for one in _OURS)
            if process[1] and (process in forks or (marked and not ours)):
                found.add(process)
        return found


def signal_name(number: int) -> str:
    """Return the name of a signal; of a real-time one that has none, its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def began(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; empty if it has ended, or where
    this is not Linux.
    """
    fields = _read(pid, "stat").rpartition(b")")[2].split()  # its name may contain anything
    return fields[19].decode() if len(fields) > 19 and fields[0] not in (b"Z", b"X") else ""


_log: int | None = None
"""An unnamed file in which forks that start no program register themselves."""


def _note_forks() -> None:
    global _log
    if _log is None and hasattr(os, "memfd_create"):
        _log = os.memfd_create("trireme-forks")
        os.register_at_fork(after_in_child=_note_fork)


def _note_fork() -> None:
    if _log is not None and _open:
        with suppress(OSError):
            os.write(_log, f"{os.getpid()} {began(os.getpid())}\n".encode())


def _forks() -> set[tuple[int, str]]:
    if _log is None:
        return set()
    rows = os.pread(_log, os.fstat(_log).st_size, 0).decode().splitlines()
    return {(int(pid), ticks) for pid, _, ticks in (row.partition(" ") for row in rows)}


def _described(pid: int) -> str:
    command = shown(_command(pid).strip().replace("\n", " "))
    return f"{command[:80] or 'a process'} ({pid})"


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""

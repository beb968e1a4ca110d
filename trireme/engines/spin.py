"""Spin: lets OpenMP's idle threads spin between operations on quiet cores, and sleep on busy ones.

To wake a thread takes as long as a small operation: on two cores a GRPO step of the demo takes
0.45 s with threads that spin for the next operation and 0.71 s with threads that sleep. Where
others compute on the same cores it is the other way round, 1.51 s and 0.81 s: a spinning thread
holds a core that the rest of its own operation waits for, and two runs that spin wait for each
other.

GNU's OpenMP, which torch's packages for Linux contain, reads how long its threads spin when it is
loaded (`allow_spinning`). One way is left to change it afterwards: as long as it manages more
threads than there are cores, they sleep at once. `_Sleep` adds such threads, and removes them.
Elsewhere threads do what the variable OMP_WAIT_POLICY says.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trireme.processes import environment

SPINS = 20_000
"""About half a millisecond."""
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""OpenMP's variables that say whether threads spin: a user who sets one has chosen."""
_LOOK_SECONDS = 0.25
_BUSY, _QUIET = 0.12, 0.08
"""Shares of the time for which a thread that could compute waits for a core. A run alone, which has
threads of Python too: 0.1, and up to 0.16 for a second; beside two busy processes on two cores: at
least 0.15."""
_OTHERS = 0.25
"""Cores' worth of other programs' work, of which the fewer do not count as a load: then a thread
waits for its own process alone."""
_BUSY_LOOKS, _QUIET_LOOKS = 4, 8
_TELLING = _LOOK_SECONDS * _BUSY_LOOKS
"""Seconds after which a process knows whether others compute."""
Look = tuple[float, float, float]
"""The time, and seconds so far: for which the watched thread waited for a core, and for which other
programs used the cores."""
_allowed: list[ctypes.CDLL] = []
"""The OpenMP that `allow_spinning` has loaded, if any."""
_held: list[_Sleep] = []
"""What `never_spin` has begun."""


def allow_spinning() -> None:
    """Load torch's OpenMP so that its threads may spin; call it before torch is imported.

    Processes that this one starts do not inherit that. Does nothing if the user has chosen, if
    torch has been imported, or if its OpenMP is not GNU's.
    """
    if _is_chosen() or "torch" in sys.modules or not _may_be_watched():
        return
    if libraries := _gnu_of_torch():
        with environment({"GOMP_SPINCOUNT": str(SPINS)}):
            _allowed.append(ctypes.CDLL(str(libraries[0])))


def openmp() -> ctypes.CDLL:
    """Return this process, in which all libraries see the OpenMP of torch, if that is loaded and
    GNU's. torch's packages for ARM load it for themselves alone.
    """
    process = ctypes.CDLL(None)
    if not hasattr(process, "GOMP_parallel"):
        for library in _gnu_of_torch():
            with suppress(OSError):  # it is not loaded
                ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL)
    return process


def _gnu_of_torch() -> list[Path]:
    """Return the files of GNU's OpenMP that torch's package contains: one, or none."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return []
    package = Path(found.origin).parent
    return [*package.glob("lib/libgomp*.so*"), *package.glob("../torch.libs/libgomp*.so*")]


def never_spin() -> None:
    """Let OpenMP's threads sleep whenever they are idle: where a GPU computes, threads of Python
    need the cores.
    """
    if _allowed and not _held:
        _held.append(_Sleep(1))


def watch(thread: int, count: int) -> None:
    """Let OpenMP's threads spin only while the thread with this native id, which computes with
    `count` of them, has its core to itself; until it ends. Does nothing if the user has chosen, or
    where that cannot be seen.
    """
    if _is_chosen() and not _allowed:  # where it is allowed, that choice is of other processes
        return
    if not _may_be_watched() or not hasattr(openmp(), "GOMP_parallel"):
        return
    threading.Thread(target=_watch, args=(thread, count), name="spin", daemon=True).start()


def _is_chosen() -> bool:
    return any(name in os.environ for name in _CHOICES)


def _may_be_watched() -> bool:
    return Path("/proc/self/schedstat").exists()


def _watch(thread: int, count: int) -> None:
    schedule = Path(f"/proc/self/task/{thread}/schedstat")
    first = time.monotonic(), _waited(schedule), _others()
    looks = deque([first], maxlen=_QUIET_LOOKS + 1)
    # asleep until the cores are seen to be quiet, which they may have been for long
    was_alone = first[0] - _BEGAN[0] >= _TELLING and not _others_compute(_BEGAN, first)
    sleep: _Sleep | None = None if was_alone else _Sleep(count)
    try:
        while True:
            time.sleep(_LOOK_SECONDS)
            looks.append((time.monotonic(), _waited(schedule), _others()))
            if sleep is None and _load(looks, _BUSY_LOOKS) > _BUSY:
                sleep = _Sleep(count)
            elif sleep and len(looks) > _QUIET_LOOKS and _load(looks, _QUIET_LOOKS) < _QUIET:
                sleep.end()
                sleep = None
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        pass
    finally:
        if sleep is not None:
            sleep.end()


def _load(looks: Sequence[Look], last: int) -> float:
    """Return the share of the time of the `last` looks for which the thread waited for a core; 0 if
    other programs hardly computed in it.
    """
    begin, end = looks[max(-last - 1, -len(looks))], looks[-1]
    return (end[1] - begin[1]) / (end[0] - begin[0]) if _others_compute(begin, end) else 0.0


def _others_compute(begin: Look, end: Look) -> bool:
    """Return whether other programs have computed more than a little between two looks."""
    return (end[2] - begin[2]) / (end[0] - begin[0]) > _OTHERS


def _others() -> float:
    """Return the seconds for which other programs have used the cores of this process; all of the
    time where that cannot be seen.
    """
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        lines = []
    # of programs, programs of low priority, and the system
    ticks = [sum(map(int, words[1:4])) for words in lines if words[0] in cores]
    if len(ticks) < len(cores) or not any(ticks):  # a container may number or show its own
        return time.monotonic() * len(cores)
    return sum(ticks) / os.sysconf("SC_CLK_TCK") - time.process_time()


def _waited(schedule: Path) -> float:
    """Return the seconds for which a thread could have computed and had no core."""
    return int(schedule.read_text().split()[1]) / 1e9


class _Sleep:
    """Threads of OpenMP which, with the `count` of the watched one, are more than there are cores;
    all of them sleep when idle.
    """

    def __init__(self, count: int) -> None:
        self._more = max(1, len(os.sched_getaffinity(0)) - count + 1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="sleep", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the threads."""
        self._over.set()
        self._thread.join()

    def _hold(self) -> None:
        process = openmp()
        nothing = ctypes.cast(process.getpid, ctypes.c_void_p)  # each thread calls it once
        process.GOMP_parallel(nothing, None, 1 + self._more, 0)  # this thread is one, uncounted
        self._over.wait()


_BEGAN: Look = time.monotonic(), 0.0, _others() if _may_be_watched() else 0.0
"""The look when this was imported."""

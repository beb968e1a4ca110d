"""Spin: OpenMP's threads spin on quiet cores and sleep on busy ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.limits import HANG_S
from trireme.engines import spin

GNU = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
"""The OpenMP of torch's build for CPUs."""
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes, and no core"),
]


def run_alone(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own: OpenMP reads its variables once."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S,
        env=env | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


class Looks:
    """Stands in for the clock, for what the system says of a thread, and for threads that make
    others sleep: after each look it notes whether they do.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        shares: Sequence[float],
        others: float = 1.0,
        began: float = 10.0,
        before: float = 0.0,
    ) -> None:
        """`others`: cores that other programs use, and `before` the first look, since the process
        `began`.
        """
        self.asleep: list[bool] = []
        self._held = 0
        self._time = 10.0
        monkeypatch.setattr(spin, "_BEGAN", (began, 0.0, 10.0 * others - (10.0 - began) * before))
        self._waits = self._waiting(shares)
        monkeypatch.setattr(spin, "_waited", lambda schedule: next(self._waits))
        monkeypatch.setattr(spin, "_others", lambda: self._time * others)
        monkeypatch.setattr(spin, "_Sleep", self._hold)
        monkeypatch.setattr(spin.time, "sleep", self._pass)
        monkeypatch.setattr(spin.time, "monotonic", lambda: self._time)
        spin._watch(0, 2)
        assert not self._held, "its threads outlive the one that is watched"
        self.asleep = self.asleep[1:]  # the first note is from before the first look

    def _pass(self, seconds: float) -> None:
        self.asleep.append(self._held > 0)
        self._time += seconds

    def _waiting(self, shares: Sequence[float]) -> Iterator[float]:
        waited = 0.0
        yield waited
        for share in shares:
            waited += share * spin._LOOK_SECONDS
            yield waited
        raise FileNotFoundError("the thread has ended")

    def _hold(self, count: int) -> Looks:
        self._held += 1
        return self

    def end(self) -> None:
        """As `_Sleep` has it."""
        self._held -= 1


def test_threads_spin_after_two_quiet_seconds_and_sleep_after_a_busy_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet, busy = [0.04] * 12, [0.3] * 6
    asleep = Looks(monkeypatch, [*quiet, *busy, *quiet]).asleep
    # the mean of the last four looks passes 0.12 with the second busy one, that of the last eight
    # is below 0.08 when one of them is left (0.0725)
    assert asleep == [True] * 7 + [False] * 6 + [True] * 11 + [False] * 6


def test_a_single_busy_look_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = Looks(monkeypatch, [*[0.04] * 10, 0.3, *[0.04] * 10]).asleep
    assert asleep == [True] * 7 + [False] * 14


def test_threads_that_wait_for_their_own_process_alone_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asleep = Looks(monkeypatch, [0.3] * 20, others=0.1).asleep
    assert asleep == [True] * 7 + [False] * 13


@pytest.mark.parametrize(
    ("before", "began", "asleep"),
    [(0.1, 7.0, 0), (0.1, 9.5, 7), (0.5, 7.0, 7)],
    ids=["alone", "alone for half a second", "not alone"],
)
def test_threads_spin_at_once_where_the_process_was_alone_since_it_began(
    before: float, began: float, asleep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch, [0.04] * 12, began=began, before=before)
    assert looks.asleep == [True] * asleep + [False] * (12 - asleep)


def test_threads_that_began_to_spin_sleep_when_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [*[0.04] * 4, *[0.3] * 8]
    few = Looks(monkeypatch, shares, others=0.25, began=7.0)
    assert few.asleep == [False] * 12, "others use too little"
    assert Looks(monkeypatch, shares, began=7.0).asleep == [False] * 5 + [True] * 7


def test_what_other_programs_compute_is_seen() -> None:
    others = spin._others()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        end = time.monotonic() + HANG_S
        while spin._others() - others < 0.3:
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        busy.kill()


@pytest.mark.parametrize(
    "text", [None, "cpu 9 9 9 9\n", "".join(f"cpu{n} 0 0 0\n" for n in range(4096))]
)
def test_where_others_cannot_be_seen_all_of_the_time_is_theirs(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str:
        if text is None:
            raise PermissionError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(spin.time, "monotonic", lambda: 8.0)
    assert spin._others() == 8.0 * len(os.sched_getaffinity(0))


@pytest.mark.skipif(not GNU.exists(), reason="Linux alone")
def test_a_commands_threads_spin_half_a_millisecond_and_its_programs_sleep() -> None:
    program = """
import os, subprocess, sys
from trireme.cli.run import set_environment
before = dict(os.environ)
set_environment()
print({name: os.environ[name] for name in os.environ if os.environ[name] != before.get(name)})
sys.stdout.flush()
os.environ["OMP_DISPLAY_ENV"] = "FALSE"
import torch
os.environ["OMP_DISPLAY_ENV"] = "VERBOSE"
subprocess.run([sys.executable, "-c", "import torch"], check=True)
"""
    done = run_alone(program, OMP_DISPLAY_ENV="VERBOSE")
    assert "'OMP_WAIT_POLICY': 'PASSIVE'" in done.stdout and "GOMP" not in done.stdout
    counts = [line.split("'")[1] for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert counts == [str(spin.SPINS), "0"], "its own, and that of a program that it starts"


@pytest.mark.skipif(not GNU.exists(), reason="Linux alone")
def test_who_has_chosen_is_obeyed() -> None:
    program = """
import os, threading
from trireme.cli.run import set_environment
set_environment()
import torch
from trireme.engines.device import Device
device = Device(2)
print(os.environ["OMP_WAIT_POLICY"], [one.name for one in threading.enumerate()])
"""
    done = run_alone(program, OMP_WAIT_POLICY="ACTIVE")
    assert done.stdout.startswith("ACTIVE") and "'spin'" not in done.stdout
    assert "'spin'" in run_alone(program).stdout


@pytest.mark.skipif(not GNU.exists(), reason="Linux alone")
def test_a_commands_threads_sleep_where_a_gpu_computes() -> None:
    program = """
import threading
from trireme.cli.run import set_environment
set_environment()
import torch
from trireme.engines.device import Device
torch.cuda.is_available = lambda: True
devices = [Device(2), Device(2)]
print(sorted(one.name for one in threading.enumerate() if not one.name.startswith("device")))
"""
    assert run_alone(program).stdout.split() == ["['MainThread',", "'sleep']"]


@pytest.mark.skipif(not GNU.exists(), reason="Linux alone")
def test_more_threads_than_cores_make_all_of_them_sleep() -> None:
    """Seconds of the process for an operation that follows a pause of three milliseconds: who spins
    computes through all of them.
    """
    program = """
import time, torch
import trireme.engines.device as device
from trireme.engines.spin import _Sleep

device.watch = lambda thread, count: None  # this test decides
used = device.Device(2)
numbers = torch.ones(1 << 17)  # two threads' work of some twenty microseconds

def seconds():
    began, count = time.process_time(), 100
    for _ in range(count):
        numbers.add_(1)
        time.sleep(0.003)
    return (time.process_time() - began) / count

def once():
    return used._pool.submit(seconds).result()

once()
spinning = once()
sleep = _Sleep(2)
time.sleep(0.1)
asleep = once()
sleep.end()
print(spinning, asleep, once())
"""
    spinning, asleep, again = map(float, run_alone(program).stdout.split())
    spins = len(os.sched_getaffinity(0)) > 1  # two threads on one core sleep anyway
    assert (spinning > 2 * asleep, again > 2 * asleep) == (spins, spins)


@pytest.mark.skipif(not GNU.exists(), reason="Linux alone")
def test_an_openmp_that_torch_has_for_itself_alone_is_shared() -> None:
    program = f"""
import ctypes
from trireme.engines.spin import openmp
seen = lambda: hasattr(ctypes.CDLL(None), "GOMP_parallel")
openmp()
print(seen())
ctypes.CDLL({str(GNU)!r})  # as torch's packages for ARM load it
print(seen())
openmp()
print(seen())
"""
    assert run_alone(program).stdout.split() == ["False", "False", "True"]


def test_what_watches_ends_with_the_device() -> None:
    program = """
import threading, time
from trireme.engines.device import Device
device = Device(2)
device.close()
end = time.monotonic() + 600
while threading.active_count() > 1 and time.monotonic() < end:
    time.sleep(0.01)
print(threading.active_count())
"""
    assert run_alone(program).stdout.split() == ["1"]

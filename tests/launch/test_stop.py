"""A run that is asked to end does so in its time, whatever holds the main thread."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.limits import HANG_S
from trireme.launch import stop
from trireme.usercode import UserCode

STUCK = """
    import asyncio, ctypes, os, sys, threading, types
    from trireme.aio import LoopWatch
    from trireme.launch.stop import Stop
    sys.modules["trireme.trainer.trainer"] = types.ModuleType("small")  # the other loads torch
    sys.modules["trireme.trainer.trainer"].Stopped = InterruptedError

    async def work():
        if "explores" in sys.argv:
            LoopWatch(600.0)
        library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
        library.pthread_mutex_lock(lock)
        threading.Timer(0.5, print, ["stuck"], {"flush": True}).start()  # once it is
        library.pthread_mutex_lock(lock)  # for ever: no signal interrupts it, no handler runs

    stop = Stop()
    stop.limit = 1.0 if sys.argv[1] == "short" else 600.0
    stop.listen()
    stop.run(work())
"""
FORKS = """
    import asyncio, os, signal, sys, time, types
    from trireme.launch.stop import Stop
    sys.modules["trireme.trainer.trainer"] = types.ModuleType("small")  # the other loads torch
    sys.modules["trireme.trainer.trainer"].Stopped = InterruptedError

    async def work():
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
            print("stuck", flush=True)
            time.sleep(600)
        await asyncio.to_thread(sys.stdin.readline)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        await asyncio.sleep(1)

    stop = Stop()
    stop.listen()
    stop.run(work())
    print("asked:", stop.number)
"""
POOL = """
    import asyncio, multiprocessing, sys, types
    from trireme.aio import LoopWatch, in_thread
    from trireme.launch.stop import Stop
    sys.modules["trireme.trainer.trainer"] = types.ModuleType("small")  # the other loads torch
    sys.modules["trireme.trainer.trainer"].Stopped = InterruptedError

    def pool():
        with multiprocessing.get_context("fork").Pool(2) as workers:  # ends them by SIGTERM
            return workers.map(abs, [-1, 2])

    async def work():
        print("stuck", flush=True)
        LoopWatch(600.0)
        return [pool(), await in_thread(pool, name="workflow-0")]

    stop = Stop()
    stop.listen()
    print(stop.run(work()), file=sys.stderr)
"""
UNHEARD = """
    import asyncio, os, signal, sys, types
    from trireme.launch.stop import Stop
    sys.modules["trireme.trainer.trainer"] = types.ModuleType("small")  # the other loads torch
    sys.modules["trireme.trainer.trainer"].Stopped = InterruptedError

    def lost():
        raise FileNotFoundError("the job's folder")

    async def work():
        if sys.argv[1] == "a full pipe":
            reader, writer = os.pipe()
            os.dup2(writer, 2)
            os.set_blocking(2, False)
            while True:
                try:
                    os.write(2, b"x" * 65536)
                except BlockingIOError:
                    break
            os.set_blocking(2, True)
        else:
            os.close(2)
        print("stuck", flush=True)
        stop.end_work = lambda: True  # it says that it ends, and does not
        await asyncio.sleep(600)

    stop = Stop()
    stop.limit, stop.what_is_left = 1.0, lost
    stop.listen()
    stop.run(work())
"""

LATE = """
    import asyncio, atexit, sys, time, types
    from contextlib import suppress
    from trireme.aio import in_thread
    from trireme.launch.stop import Stop, leave_at_once
    sys.modules["trireme.trainer.trainer"] = types.ModuleType("small")  # the other loads torch
    sys.modules["trireme.trainer.trainer"].Stopped = InterruptedError

    async def work():
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await in_thread(lambda: time.sleep(float(sys.argv[1])), name="workflow-0")
        print("stuck", flush=True)

    stop = Stop()
    stop.run(work())
    atexit.register(print, "Python's end", file=sys.stderr)
    leave_at_once(3)
    sys.exit(3)
"""


HEARS = """
    import signal

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
"""
"""What undoes that a shell's background job ignores SIGINT, and one under nohup SIGHUP."""


@contextmanager
def program(text: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A program that has printed `stuck`."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", textwrap.dedent(HEARS) + textwrap.dedent(text), *words]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "stuck\n"
            yield process
        finally:
            process.kill()


def test_a_main_thread_that_a_library_holds_ends_by_the_time_limit() -> None:
    with program(STUCK, "short") as process:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=HANG_S)
    first, last = said.splitlines()
    assert first.startswith("SIGTERM: ending at the next safe point, in 1 s at most")
    assert last.startswith("SIGTERM: ended after 1 s (cluster.stop_timeout)")
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("what", ["trains", "explores"])
def test_a_second_control_c_ends_it_at_once(what: str) -> None:
    with program(STUCK, "long", what) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None and "ending at" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=HANG_S)
    assert said == "ended at once by a second Ctrl-C\n" and process.returncode == 130


def test_of_two_threads_that_hear_a_second_control_c_one_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []
    monkeypatch.setattr(stop, "_write", written.append)
    monkeypatch.setattr(stop, "end_now", lambda: asked._end("the other thread"))
    monkeypatch.setattr(stop.os, "_exit", lambda code: written.append(str(code)))
    asked = stop.Stop()
    asked._end("the first thread")
    assert written == ["the first thread\n", "130"]


def test_a_signal_to_a_child_is_none_to_the_run() -> None:
    with program(FORKS) as process:
        out, said = process.communicate("go\n", timeout=HANG_S)
    assert (out, process.returncode) == ("asked: None\n", 0), said


def test_workers_of_multiprocessing_end_by_its_signal() -> None:
    """Its usual way on Linux before Python 3.14 is a fork, which inherits handlers of signals."""
    with program(POOL) as process:
        _, said = process.communicate(timeout=HANG_S)
    assert (said, process.returncode) == ("[[1, 2], [1, 2]]\n", 0)


@pytest.mark.parametrize("stderr", ["a full pipe", "a closed terminal"])
def test_a_run_ends_in_its_time_where_nobody_takes_what_it_says(stderr: str) -> None:
    """Nor is a signal less heard: of SIGHUP a closed terminal is the reason. The folder that the
    last sentence would speak of is gone as well.
    """
    with program(UNHEARD, stderr) as process:
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=HANG_S) == 128 + signal.SIGHUP


@pytest.mark.parametrize(("seconds", "end"), [("0", "Python's end\n"), ("600", "")])
def test_python_does_not_end_a_thread_whose_rollout_is_over(seconds: str, end: str) -> None:
    """One that computes with torch would abort the process, after a run that has succeeded."""
    with program(LATE, seconds) as process:
        _, said = process.communicate(timeout=HANG_S)
    assert (said, process.returncode) == (end, 3)


@pytest.mark.parametrize("run", [stop.Stop().run, stop.run_to_its_end])
def test_an_exit_of_a_task_of_its_own_ends_neither_the_run_nor_what_else_goes_on(
    run: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio ends the loop by it: the run would have ended at once, with success."""

    async def leaves(code: int) -> None:
        sys.exit(code)

    async def rollout() -> str:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(leaves(3))
                group.create_task(asyncio.sleep(HANG_S))
        except SystemExit as error:
            return f"it raised {error.code}"
        return "it went on"

    async def work() -> list[str]:
        other = asyncio.create_task(asyncio.sleep(0.05, "the other went on"))
        forgotten = asyncio.create_task(leaves(0))
        asyncio.get_running_loop().call_soon(sys.exit, 0)
        said = [await rollout(), await other]
        assert isinstance(forgotten.exception(), SystemExit)
        return said

    assert run(work()) == ["it raised 3", "the other went on"]
    texts = [record.getMessage() for record in caplog.records]
    assert [text.split(" in a task ")[0] for text in texts] == [
        *("user code raised SystemExit: 0",) * 2,
        "user code raised SystemExit: 3",
    ]
    assert caplog.records[0].place.endswith("sys.exit(code)")  # pyright: ignore


@pytest.mark.parametrize("signalled", [False, True])
def test_a_keyboard_interrupt_that_no_signal_has_raised_ends_its_task_alone(
    monkeypatch: pytest.MonkeyPatch, signalled: bool
) -> None:
    async def interrupts() -> None:
        raise KeyboardInterrupt

    async def work() -> str:
        (error,) = await asyncio.gather(interrupts(), return_exceptions=True)
        return repr(error)

    handler = signal.default_int_handler if signalled else stop.Stop()._on_signal
    monkeypatch.setattr(stop.signal, "getsignal", lambda number: handler)
    if signalled:
        with pytest.raises(KeyboardInterrupt):
            stop.Stop().run(work())
    else:
        assert stop.Stop().run(work()) == "KeyboardInterrupt()"


@pytest.mark.parametrize("in_user_code", [False, True])
def test_an_exit_by_somebody_elses_handler_of_a_signal_ends_the_run(in_user_code: bool) -> None:
    """Such as the one that `ray.init` of a workflow installs for SIGTERM: it was ignored, or taken
    for a failure of the rollout whose code it interrupted.
    """

    def leave(number: int, frame: Any) -> None:
        sys.exit(number)

    async def rollout() -> None:
        with UserCode("workflow 'busy'") as _:
            signal.raise_signal(signal.SIGUSR1)

    async def work() -> None:
        if in_user_code:
            with suppress(Exception):
                await asyncio.create_task(rollout())
        else:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            await asyncio.sleep(2)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(SystemExit, match=str(signal.SIGUSR1.value)):
            stop.Stop().run(work())
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_run_that_user_code_cancels_says_so() -> None:
    async def work() -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(HANG_S)

    with pytest.raises(RuntimeError, match="the run was cancelled by other code: expected user"):
        stop.Stop().run(work())


def test_an_exit_of_the_work_itself_is_its_end() -> None:
    async def work() -> None:
        sys.exit(5)

    with pytest.raises(SystemExit, match="5"):
        stop.Stop().run(work())

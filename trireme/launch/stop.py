"""Stop: ends a run on a signal: at its next safe point, with a checkpoint, and in bounded time.

Invariants:
- SIGINT, SIGTERM and SIGHUP ask once. A second Ctrl-C ends the process at once, and so does the
  time limit, whatever user code does meanwhile; the message names what was waited for. Both hold
  even while a library blocks the main thread (a cluster's client that waits for an answer, say): a
  thread is woken by Python's handler in C, since the handler in Python waits for the main thread.
- Child processes see their pipe close; files are renamed when they are whole and stores have
  transactions: ending at any instruction loses nothing that a resume does not redo.
- A SystemExit or KeyboardInterrupt that no signal's handler has raised, in a task or a callback
  that user code began, ends that alone, although asyncio lets it end the event loop: a run that
  ended so would report success.
- Coroutines that still run when the work has ended are cancelled, and awaited for at most `LEFT_S`:
  one may ignore its cancellation, and the run ends all the same.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar, cast

from trireme.aio import CancelledElsewhere, code_hangs
from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.log import get_logger
from trireme.processes import end_now
from trireme.text import say, shown
from trireme.usercode import by_handler, fault_of

T = TypeVar("T")
logger = get_logger("launcher")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 25.0
"""The time limit before a plan is known."""
LEFT_S = 5.0
"""Seconds that cancelled coroutines have to end."""
SAY_S = 1.0
"""Seconds that a message on stderr may wait for a reader."""
PYTHON = (sys.prefix, sys.base_prefix)
"""Files below these are Python's own, or a package's."""


class Stop:
    """A request to end the run, and the signal that made it."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The first signal received."""
        self.plan: Plan | None = None
        """The running plan."""
        self.fresh = False
        """Whether the same command begins another run."""
        self.limit = GRACE_S
        self.waits_for: Callable[[], str] = lambda: ""
        """Names what the work waits for, as a noun; empty if it cannot tell."""
        self.end_work: Callable[[], bool] = lambda: False
        """Asks the work to end by itself; False if it has nothing to save."""
        self._lock = threading.RLock()  # a handler may interrupt itself
        self._ending = threading.Lock()
        """Locked by the one thread that ends the process: two may receive a second Ctrl-C."""
        self._main_heard = self._thread_heard = False
        """Whether the main thread's handler has received a first signal, and whether the signal
        thread has."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def begin(self, plan: Plan) -> None:
        """Note that `plan` runs from now on."""
        self.plan, self.limit = plan, plan.config.cluster.stop_timeout
        self.waits_for = lambda: ""

    @property
    def name(self) -> str:
        """Return the usual name of the signal."""
        number = self.number or signal.SIGINT
        return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name

    @property
    def code(self) -> int:
        """Return the exit code: 128 plus the signal's number."""
        return 128 + (self.number or signal.SIGINT)

    def what_is_left(self) -> str:
        """Describe what is saved in the job's folder, and what the same command does with it."""
        plan = self.plan
        if plan is None:
            return "nothing had begun"
        if plan.mode not in ("both", "train"):
            if plan.mode == "explore":
                return "the same command continues after the last explore step in the buffer"
            return "the same command starts over"
        folder = JobFolder(plan.job_dir)
        steps = [step for step in folder.steps() if folder.is_full(step)]
        stage = f" of stage '{plan.stage_name}'" if plan.stage_name else ""
        saved = f"the checkpoint of step {steps[-1]}" if steps else "no checkpoint"
        saved += f"{stage} is saved"
        if self.fresh:
            job = plan.config.name
            return f"{saved}; to resume, add name={job} in place of --fresh" if steps else saved
        if not plan.config.continue_from_checkpoint:
            job = plan.root_dir.name
            over = f"{saved}; the same command starts over (continue_from_checkpoint: false)"
            to_resume = f"; add name={job} continue_from_checkpoint=true to resume"
            return over + to_resume if steps else over
        if steps:
            return f"{saved}; the same command resumes from it"
        begun = f"stage '{plan.stage_name}' " if plan.stage_name else ""
        return f"{saved}; the same command starts {begun}over"

    def listen(self) -> None:
        """Receive signals from now on; call again after something else has installed handlers."""
        if threading.current_thread() is threading.main_thread():
            _report_to(self)
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    signal.signal(number, self._on_signal)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on a new event loop and return its result. Raises KeyboardInterrupt if it was
        stopped.
        """
        # imports torch, which takes seconds: not before the configuration has been checked
        from trireme.trainer.trainer import Stopped

        loop = self._loop = asyncio.new_event_loop()
        try:
            asyncio.set_event_loop(loop)
            self._task = loop.create_task(work)
            if self.number is not None:
                self._stop_work()
            return _to_its_end(partial(loop.run_until_complete, self._task), self._task)
        except (asyncio.CancelledError, Stopped) as error:
            if self.number is not None:
                raise KeyboardInterrupt from None
            if isinstance(error, Stopped):
                raise
            raise CancelledElsewhere("the run") from error
        finally:
            self.end_work = lambda: False
            self._loop = self._task = None
            _abandoned.extend(_close(loop))
            self.waits_for = lambda: ""  # else a stage's models stay through the next one

    def request(self) -> None:
        """Request a stop as Ctrl-C does, from another thread; without the time limit."""
        self.number = self.number or signal.SIGINT
        self._main_heard = self._thread_heard = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop_work)

    def hears(self, number: int) -> bool:
        """Return whether a signal's handler is this one's, or a LoopWatch's around it."""
        if number not in SIGNALS:
            return False
        return inspect.unwrap(cast(Any, signal.getsignal(number))) == self._on_signal

    def hear(self, number: int) -> None:
        """Handle a signal at once; its Python handler may yet have to wait for the main thread."""
        if not self.hears(number):
            return
        first, self._thread_heard = not self._thread_heard, True
        self._begin_ending(number, first)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first, self._main_heard = not self._main_heard, True
        self._begin_ending(number, first)
        if first and self._loop is None:
            raise KeyboardInterrupt  # nothing is running that could save anything
        if first and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop_work)

    def _begin_ending(self, number: int, first: bool) -> None:
        """Start the time limit, once; a second Ctrl-C ends the process."""
        if not first:
            if number == signal.SIGINT:
                self._end("ended at once by a second Ctrl-C")
            return  # SIGTERM may be sent to all processes, and more than once
        with self._lock:
            if self.number is not None:
                return
            self.number = number
        timer = threading.Timer(self.limit, self._time_is_up)
        timer.daemon = True
        timer.start()
        if self._loop is not None:
            _write(
                f"{self.name}: ending at the next safe point, in {self.limit:g} s at most "
                "(cluster.stop_timeout); Ctrl-C: at once\n"
            )

    def _stop_work(self) -> None:
        if self._task is not None and not self.end_work():
            self._task.cancel()

    def _time_is_up(self) -> None:
        frames = sys._current_frames().get(threading.main_thread().ident or 0)
        calls = traceback.extract_stack(frames) if frames else []
        busy = next((f for f in reversed(calls) if not f.filename.startswith(PYTHON)), None)
        where = f"; the event loop is at {busy.filename}:{busy.lineno}" if busy else ""
        awaited, left = "the parts of the run to end", ""
        with suppress(Exception):  # the folder may be gone: the process ends all the same
            awaited = self.waits_for() or awaited
            left = f"; {self.what_is_left()}"
        self._end(
            f"{self.name}: ended after {self.limit:g} s (cluster.stop_timeout), which was too "
            f"short for {awaited}{where}{left}"
        )

    def _end(self, text: str) -> None:
        """End the process at once: any other action might hang."""
        if not self._ending.acquire(blocking=False):
            return
        with suppress(Exception):
            cursor = "\x1b[?25h" if sys.stdout.isatty() else ""  # a live display hides it
            _write(f"{cursor}{shown(text)}\n")
        end_now()
        os._exit(self.code)


def _write(text: str) -> None:
    """Write past `sys.stderr`, which the signal may have interrupted, and only if somebody reads
    it: a closed terminal is the reason for SIGHUP, and nobody may read a pipe.
    """
    with suppress(OSError, ValueError):
        if select.select([], [2], [], SAY_S)[1]:
            os.write(2, text.encode())


def leave_at_once(code: int) -> None:
    """End the process if coroutines of a run are left, or code hangs in a thread: Python would
    throw into the ones, and end the others, which aborts the process if one is in a function of
    torch. For the end of a command line: what runs in a notebook or a test goes on.
    """
    if _abandoned or code_hangs():
        sys.stdout.flush()
        sys.stderr.flush()
        end_now()
        os._exit(code)


def run_to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's `work` on a new event loop, as `asyncio.run` does, also past a SystemExit in
    a task that user code began: the command would end as if it had succeeded.
    """
    with asyncio.Runner() as runner:
        task = runner.get_loop().create_task(work)
        return _to_its_end(lambda: runner.run(_finished(task)), task)


async def _finished(task: asyncio.Task[Any]) -> None:
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:  # by Ctrl-C, which only the work's end shows to `_to_its_end`
        task.cancel()
        await asyncio.wait({task})
        raise


def _to_its_end(run: Callable[[], object], work: asyncio.Task[T]) -> T:
    """Let `run` run the loop until `work` is done, also past what ends another task or a
    callback.
    """
    while True:
        try:
            run()
            return work.result()
        except (SystemExit, KeyboardInterrupt) as error:
            if work.done() or _is_of_a_signal(error):
                raise
            fault = fault_of(error, "user code")
            assert fault is not None
            logger.warning(
                "user code raised %s in a task or a callback that it began: only what awaits it "
                "fails, and the run continues",
                fault.text, extra={"place": fault.place},
            )  # fmt: skip


def _is_of_a_signal(error: BaseException) -> bool:
    """Return whether a signal's handler has raised it: one of user code or of a library, or
    Python's own for Ctrl-C, which has no frame.
    """
    if by_handler(error):
        return True
    handlers = map(signal.getsignal, signal.valid_signals())
    main = threading.current_thread() is threading.main_thread()
    return main and isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers


def _close(loop: asyncio.AbstractEventLoop) -> list[str]:
    """End what is left on a loop; returns where tasks are that ignore it, which are abandoned."""
    places: list[str] = []
    try:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            _, stuck = loop.run_until_complete(asyncio.wait(left, timeout=LEFT_S))
            places = [*map(_place_of, stuck)]
            for place in places:
                # the log is closed by now
                say(f"warning: left running: {place} ignores its cancellation", file=sys.stderr)
            if stuck:  # do not report them again when they are destroyed
                loop.set_exception_handler(lambda loop, context: None)
        with suppress(asyncio.TimeoutError):
            loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), LEFT_S))
        with suppress(asyncio.TimeoutError):
            loop.run_until_complete(asyncio.wait_for(loop.shutdown_default_executor(), LEFT_S))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return places


def _place_of(task: asyncio.Task[Any]) -> str:
    """Return where a task is: its innermost line outside Python's own files and packages."""
    coroutine, line = task.get_coro(), repr(task.get_coro())
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        code = frame.f_code
        if not code.co_filename.startswith(PYTHON):
            line = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        coroutine = getattr(coroutine, "cr_await", None)
    return line


_abandoned: list[str] = []
"""Where coroutines are that ignored their cancellation at a run's end."""
_receiver: list[Stop] = []
"""The Stop that receives the signals; empty before the first."""
_wakeup: list[socket.socket] = []
"""The socket to which Python's handler in C writes signals. It is never closed, since the handler
may write at any time."""


def _report_to(stop: Stop) -> None:
    """Start a thread that also reports signals to `stop`."""
    _receiver[:] = [stop]
    if not _wakeup:
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        _wakeup.append(writer)
        os.register_at_fork(after_in_child=_disconnect_child)
        threading.Thread(target=_read_signals, args=(reader,), name="signals", daemon=True).start()
    number = _wakeup[0].fileno()
    before = signal.set_wakeup_fd(number, warn_on_full_buffer=False)
    if before not in (-1, number):  # it belongs to an event loop around the run: restore it
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def _read_signals(reader: socket.socket) -> None:
    while numbers := reader.recv(16):
        for number in numbers:
            _receiver[0].hear(number)


def _disconnect_child() -> None:
    """Disconnect a child process, whose signals are not ours: it ends by them, as a worker of
    multiprocessing must by SIGTERM.
    """
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if _receiver[0].hears(number):
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)

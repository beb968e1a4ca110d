"""Aio: runs concurrent work, users' code, plain or async, and code that blocks the event loop.

In concurrent work the first failure ends all (`first_failure`), and no task is left behind.

Blocking code runs in a separate daemon thread, not in a shared pool, which hung code would use up:
a call that hangs here delays no other, and does not keep the process alive. Code that hangs on the
event loop blocks everything, time-outs and Ctrl-C included.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial, wraps
from queue import SimpleQueue
from types import FrameType
from typing import Any, ClassVar, TypeVar

from trireme.log import get_logger
from trireme.processes import end_now
from trireme.usercode import UserCode, innermost

T = TypeVar("T")
WARN_S, LOOK_S, INTERRUPT_S, SHARE_S = 10.0, 0.5, 2.0, 20.0
_AWAITS = "__trireme_awaits__"


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop of this thread, if one is running."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


GRACE_S = 3.0
"""Seconds that the cause of a failure may take to arrive after its consequences."""


@asynccontextmanager
async def running(*work: Awaitable[Any]) -> AsyncIterator[Sequence[asyncio.Future[Any]]]:
    """Yield the work as tasks, all of which have ended afterwards: tasks that still run then are
    cancelled.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class CancelledElsewhere(RuntimeError):
    """Code that did not begin a task has cancelled it, as user code does that cancels all tasks of
    the event loop. Its argument says what was cancelled.
    """

    def __str__(self) -> str:
        return (
            f"{self.args[0]} was cancelled by other code: expected user code to cancel only the "
            "tasks that it began, and never all of `asyncio.all_tasks()`"
        )


async def first_failure(
    *work: Awaitable[Any], consequence: type[Exception] | tuple[()] = ()
) -> list[Any]:
    """Return the results of all; the first that raises cancels the others and its error is raised.
    Raises CancelledElsewhere for one that other code has cancelled.

    A `consequence` is raised only because another task has failed, and gives way to that one's
    error: their order is random, and over processes one may come without the other.
    """
    if not work:
        return []
    async with running(*work) as tasks:
        await _all_or_a_failure(tasks)
        follows = [error for task in tasks if isinstance(error := _error(task), consequence)]
        for error in follows:
            if error.__cause__ is not None:
                raise error.__cause__ from None
        if follows and (pending := [task for task in tasks if not task.done()]):
            await asyncio.wait(pending, timeout=GRACE_S)
        failures = [error for task in tasks if (error := _error(task)) is not None]
        for failure in sorted(failures, key=lambda error: isinstance(error, consequence)):
            raise failure
        return [task.result() for task in tasks]


async def _all_or_a_failure(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until all are done or one has failed: to `asyncio.wait` a cancelled one has not."""
    enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = len(tasks)

    def count(task: asyncio.Future[Any]) -> None:
        nonlocal left
        left -= 1
        if not enough.done() and (not left or _error(task) is not None):
            enough.set_result(None)

    for task in tasks:
        task.add_done_callback(count)
    await enough


async def one_by_one(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all; each begins one turn of the loop after the one before, so that
    other tasks run between their first parts. The first that raises ends all.
    """
    tasks: list[asyncio.Future[T]] = []
    try:
        for each in work:
            tasks.append(asyncio.ensure_future(each))
            await asyncio.sleep(0)
        return await first_failure(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class OutOfTime(TimeoutError):
    """The time that `in_time` gives is over."""


async def in_time(work: Awaitable[T], seconds: float | None) -> T:
    """Return the result of the work. Raises OutOfTime if it takes longer, which a TimeoutError that
    the work itself raises is not.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if limit.expired() and isinstance(error.__cause__, asyncio.CancelledError):
            raise OutOfTime from error
        raise


async def ended(future: asyncio.Future[Any], seconds: float) -> None:
    """Wait until a future is done, for at most so many seconds; its result and its error stay in
    it. `asyncio.wait` does the same for several, and takes twice as long for one.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = loop.call_later(seconds, wake)
    future.add_done_callback(wake)
    try:
        await waiter
    finally:
        timer.cancel()
        future.remove_done_callback(wake)


def _error(task: asyncio.Future[Any]) -> BaseException | None:
    if task.cancelled():
        return CancelledElsewhere("a part of the run")
    return task.exception() if task.done() else None


Away = Callable[[Callable[[], Any]], Awaitable[Any]]
"""The way in which a plain function leaves the event loop: `OwnThread(...).run`,
`asyncio.to_thread`."""


def is_async(function: Any) -> bool:
    """Return whether a call returns a coroutine: the function is an `async def`, or an object whose
    `__call__` is one. A partial is judged by the function it wraps.
    """
    while isinstance(function, partial):
        function = function.func
    called = type(function).__call__
    return (
        hasattr(function, _AWAITS)
        or inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(called)
    )


def also_blocking(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Any]:
    """Turn an `async def` into a method that a plain one of a subclass may call: `super().run()`
    waits in a thread without an event loop, and is a coroutine everywhere else.
    """

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        coroutine = method(*args, **kwargs)
        return coroutine if running_loop() is not None else asyncio.run(coroutine)

    vars(call)[_AWAITS] = True
    return call


async def call_user(function: Callable[..., Any], *args: Any, away: Away | None = None) -> Any:
    """Call a user's function, plain or `async def`, and wait for its result.

    A plain one runs where `away` takes it; without it, on the event loop.
    """
    if away is None or is_async(function):
        result = function(*args)
    else:
        result = await away(partial(function, *args))
    return await result if inspect.isawaitable(result) else result


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("a plain method returned a coroutine that waits: make it `async def`")


class OwnThread:
    """One thread that runs calls one after the other, until `close`."""

    _busy: ClassVar[set[OwnThread]] = set()
    """Those in which a function runs whose result is awaited, or was until its time was over."""

    def __init__(self, name: str) -> None:
        """The thread starts with the first call."""
        self._name = name
        self._worker: threading.Thread | None = None
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function()` in the thread; cancelling the wait does not stop it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return  # the caller no longer waits: dropped
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def call() -> None:
            result, error = None, None
            OwnThread._busy.add(self)
            try:
                result = function()
            except StopIteration as raised:  # a Future cannot hold one
                error = RuntimeError(f"raised {raised!r}").with_traceback(raised.__traceback__)
            except BaseException as raised:
                error = raised
            finally:  # before the caller learns of the end
                OwnThread._busy.discard(self)
            with suppress(RuntimeError):  # the run and its loop may have ended
                loop.call_soon_threadsafe(settle, result, error)

        self.put(call)
        _ = self._worker  # by which `awaiting` finds the line that hangs
        return await future

    def put(self, call: Callable[[], None]) -> None:
        """Queue `call`, which may not raise; its result is not awaited."""
        self._calls.put(call)
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._worker.start()

    def close(self, last: Callable[[], object] | None = None) -> None:
        """End the thread after the queued calls, and after `last`, whose result is not awaited."""
        if last is not None:
            self.put(lambda: _quiet(last))
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def code_hangs() -> bool:
    """Return whether code is still running in a thread of its own, such as that of a rollout whose
    time is over.
    """
    return bool(OwnThread._busy)


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """Run one blocking function in a separate thread."""
    thread = OwnThread(name)
    try:
        return await thread.run(function)
    finally:
        thread.close()


class LoopWatch:
    """Checks from a thread whether the event loop runs. User code that blocks it for `limit`
    seconds, or for two after Ctrl-C, ends the process: nothing else can any more.
    """

    def __init__(self, limit: float | None) -> None:
        """Begin to watch the running loop. Code that blocks it for less than `limit`, or takes half
        of its time in short calls, causes one warning. None: the loop is a server's.
        """
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._ident = threading.get_ident()
        self._stopped = threading.Event()
        self._warned = self._interrupted = False
        self._seen = deque[str](maxlen=round(SHARE_S / LOOK_S))
        """The user code that ran on the loop at the last looks; '': none."""
        self._note: Any = None
        """The handler of Ctrl-C while this watches; it wraps the one before."""
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._note = self._noting(handler)
                signal.signal(signal.SIGINT, self._note)
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        if self._note is not None and signal.getsignal(signal.SIGINT) is self._note:
            signal.signal(signal.SIGINT, self._note.__wrapped__)
        self._note = None

    def _noting(
        self, handler: Callable[[int, FrameType | None], Any]
    ) -> Callable[[int, FrameType | None], None]:
        """Return a handler that remembers Ctrl-C and calls another: asyncio passes it to the loop,
        and a blocked loop does not see it.
        """

        @wraps(handler)  # by which `Stop.hear` finds its own
        def note(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            handler(number, frame)

        return note

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look(0.0)
            turned, blocked = threading.Event(), 0.0
            try:
                self._loop.call_soon_threadsafe(turned.set)
            except RuntimeError:  # the loop has ended
                return
            while not turned.wait(LOOK_S) and not self._stopped.is_set():
                blocked += LOOK_S
                self._look(blocked)

    def _look(self, seconds: float) -> None:
        """Warn, or end the process, if user code has blocked the loop for so long."""
        frame = sys._current_frames().get(self._ident)
        part, line = innermost(frame)
        if part is None or not line:
            self._seen.append("")
            return  # ours: an engine that begins, for example
        self._seen.append(part.what)
        if self._interrupted and seconds >= INTERRUPT_S:
            text = f"stopped while {part.what} blocked the event loop"
            self._end(line, frame, text, 130)
        elif self._limit is not None and seconds >= self._limit:
            self._end(line, frame, self._blocking(part, self._limit), 1)
        elif not self._warned and (text := self._too_much(part, seconds)):
            self._warned = True
            get_logger("explorer").warning("%s (%s)", text, line)

    def _too_much(self, part: UserCode, seconds: float) -> str:
        """Say that user code takes too much of the loop's time; '': it does not."""
        if seconds >= WARN_S:
            return self._blocking(part, seconds)
        if seconds or self._seen.count(part.what) * LOOK_S < SHARE_S / 2:
            return ""  # while it blocks, the text above may yet come
        return (
            f"{part.what} has run on the event loop for half of {SHARE_S:g} s, and every other "
            f"rollout waits meanwhile: {_advice(part)}"
        )

    def _end(self, line: str, frame: FrameType | None, text: str, code: int) -> None:
        # a server has no log in which a reader would want the stack
        stack = "".join(traceback.format_stack(frame)) if self._limit is not None else f"  {line}"
        get_logger("explorer").error("%s\n%s", text, stack, extra={"place": line})
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # show the cursor, which a live display hides
        sys.stdout.flush()
        end_now()
        os._exit(code)

    def _blocking(self, part: UserCode, seconds: float) -> str:
        limit = "" if self._limit is None else " (explorer.max_timeout holds for what awaits)"
        return (
            f"{part.what} has blocked the event loop for {seconds:g} s{limit}, and every other "
            f"rollout waits for it: {_advice(part)}"
        )


def _advice(part: UserCode) -> str:
    waits = "`await asyncio.sleep(...)` or `await asyncio.to_thread(...)`"
    if not part.what.startswith("reward "):
        return f"use {waits} there, or make it a plain `def`"
    if is_async(part.code):
        return f"use {waits} there"
    # unlike a workflow, it runs where its workflow runs
    return f"make it `async def`, and use {waits} there"


def _quiet(function: Callable[[], object]) -> None:
    """Ignore errors of the last call, since the program is ending."""
    with suppress(Exception):
        function()

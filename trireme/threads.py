"""Threads: runs code that blocks in a daemon thread of its own.

Not in a shared pool, which hung code would use up: what hangs here holds up nobody else, and does
not keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class OwnThread:
    """One thread that runs what it is given, one call after the other, until `close`."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[[], T]) -> T:
        """`function()` in the thread; cancelling the wait does not stop it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return  # nobody waits any more: dropped
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def call() -> None:
            result, error = None, None
            try:
                result = function()
            except StopIteration as raised:  # no Future takes one
                error = RuntimeError(f"raised {raised!r}").with_traceback(raised.__traceback__)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the run, and its loop, may have ended
                loop.call_soon_threadsafe(settle, result, error)

        self._calls.put(call)
        return await future

    def close(self, last: Callable[[], object] | None = None) -> None:
        """End the thread after what it was given, and after `last`, whose result nobody awaits."""
        if last is not None:
            self._calls.put(lambda: _quiet(last))
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """Run one blocking function in a thread of its own."""
    thread = OwnThread(name)
    try:
        return await thread.run(function)
    finally:
        thread.close()


def _quiet(function: Callable[[], object]) -> None:
    """Whatever the last call raises: nobody is there to hear it."""
    with suppress(Exception):
        function()

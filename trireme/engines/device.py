"""Device: one thread through which all work on the accelerator (or the CPU's cores) goes.

An engine step and a train step so exclude each other, and torch keeps one pool of threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from trireme.engines.turns import Turns

T = TypeVar("T")


class Device:
    """Runs functions one after the other in a worker thread."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads` is how many cores torch uses; None leaves torch's own choice."""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        if threads is not None:
            torch.set_num_threads(threads)
        self.turns: Turns | None = None
        """With an engine of another process, which has the accelerator meanwhile."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)` in the device's thread, after what was asked for before."""
        loop = asyncio.get_running_loop()
        if self.turns is None:
            return await loop.run_in_executor(self._pool, function, *args)
        async with self.turns.trainers():
            try:
                return await loop.run_in_executor(self._pool, function, *args)
            finally:
                torch.cuda.empty_cache()  # what torch keeps for later the engine needs now

    def close(self) -> None:
        """End the thread after what runs now."""
        self._pool.shutdown(wait=True, cancel_futures=True)

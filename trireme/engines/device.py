"""Device: one thread through which all work on the accelerator (or the CPU's cores) goes.

An engine step and a train step so exclude each other, and torch keeps one pool of threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Device:
    """Runs functions one after the other in a worker thread."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads` is how many cores torch uses; None leaves torch's own choice."""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        if threads is not None:
            torch.set_num_threads(threads)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)` in the device's thread, after what was asked for before."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def close(self) -> None:
        """End the thread after what runs now."""
        self._pool.shutdown(wait=True, cancel_futures=True)

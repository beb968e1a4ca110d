"""Device: the one thread for all work on the accelerator (or the cores), and the order of that
work.

So an engine step and a train step exclude each other, and torch needs one pool of threads.

A trainer and an engine process that share one accelerator (or all ranks of a trainer and as many
engines, one pair per device) work in turns, by a ColocationLock. Before the trainer's work the
engines pause, which frees their memory if they can sleep. They resume before their next call, or at
once if they have waiting requests; calls during the trainer's work wait. An engine that has ended
is loaded again in the engines' turn, since it needs its memory for that, and both sides wait for
it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakSet

import torch

from trireme.engines.spin import never_spin, openmp, watch
from trireme.machine import cores

if TYPE_CHECKING:
    from trireme.engines.engine import Engine


class ColocationLock:
    """Gives the accelerators to the trainer (this process is its first rank) or to the engines."""

    def __init__(self, engine: Engine, *, timeout: float) -> None:
        """`timeout`: seconds that the engine waits for the trainer, `synchronizer.sync_timeout`."""
        self._engine = engine
        self._timeout = timeout
        self._resting = False
        self._uneven = False
        """Whether some engines may be awake while others rest: one was loaded again, or has ended
        before all had paused or resumed."""
        self._taken = asyncio.Lock()
        self._complete = asyncio.Event()
        """Set unless the engine waits for weights that follow."""
        self._complete.set()
        self.make_room: Callable[[], Awaitable[object]] | None = None
        """Makes the trainer free what it does not need while the engines work."""

    @asynccontextmanager
    async def for_trainer(self, *, weights_follow: bool = False) -> AsyncIterator[None]:
        """Pause the engine inside the block. `weights_follow`: the trainer will push before the
        engine is needed, so that the engine does not resume before `arrived`.
        """
        await self._persist(partial(self._take, weights_follow))
        try:
            yield
        finally:
            self._taken.release()
        if self._engine.health().waiting and self._complete.is_set():
            await self.for_engine()

    def arrived(self) -> None:
        """Note that the engine has new weights."""
        self._complete.set()

    async def for_engine(self) -> None:
        """Wait until the engine may work. Raises TimeoutError that names what it waited for."""
        if self._resting:
            await self._persist(self._hand_over)

    async def hold(self) -> None:
        """Keep the trainer off the devices until `release`, and make room, for an engine that is
        loaded again.
        """
        await self._taken.acquire()
        if self._resting:
            self._uneven = True
            try:
                await self._make_room()
            except BaseException:
                self._taken.release()
                raise

    def release(self) -> None:
        """End what `hold` began."""
        self._taken.release()

    async def _take(self, weights_follow: bool) -> None:
        """Take the devices for the trainer, with all engines at rest."""
        await self._taken.acquire()
        try:
            if self._resting and not self._uneven:
                return
            if weights_follow and not self._resting:
                self._complete.clear()
            # first: a caller that comes during the pause waits too
            self._resting = self._uneven = True
            await self._engine.pause(weights_follow=not self._complete.is_set())
            self._uneven = False
        except BaseException:
            self._taken.release()
            raise

    async def _hand_over(self) -> None:
        """Resume the engines once the trainer's work is over, and their weights have come."""
        what = "the weights of the trainer's last step"
        try:
            async with asyncio.timeout(self._timeout):
                await self._complete.wait()
                what = "the end of the trainer's work"
                await self._taken.acquire()
        except TimeoutError:
            raise TimeoutError(
                f"the engine shares the trainer's devices, and waited {self._timeout:g} s "
                f"(synchronizer.sync_timeout) for {what}"
            ) from None
        try:
            if self._resting:
                await self._make_room()
                self._uneven = True
                await self._engine.resume()
                self._resting = self._uneven = False
        finally:
            self._taken.release()

    async def _make_room(self) -> None:
        if self.make_room is not None:
            await self.make_room()

    async def _persist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do what calls all engines; again, once one that has ended is there again."""
        servers = self._engine.servers
        await (work() if servers is None else servers.persist(work))


EXPANDS, FIXED = "expandable_segments:True", "expandable_segments:False"


def allocator_options() -> str:
    """Return the user's options for torch's GPU allocator, from the variables that torch reads."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def set_allocator_options(options: str) -> None:
    """Set the allocator's options in this process; options that are not repeated are reset."""
    older = torch.cuda.memory._set_allocator_settings
    change: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", older)
    change(options)


def expand_segments(expand: bool) -> None:
    """Let GPU memory segments grow, or not, unless the user has set it: micro-batches differ in
    size, and the gaps between them would be lost. An earlier stage of this process may have set the
    opposite.
    """
    if not allocator_options():
        set_allocator_options(EXPANDS if expand else FIXED)


def return_freed_memory() -> None:
    """Return to the system what allocators keep of freed memory: C's for each thread that ever ran
    (a new thread does not reuse it), if it is glibc's, and torch's of a GPU, on which an engine's
    process may begin next.
    """
    torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def sums_in_order(device: torch.device) -> Iterator[None]:
    """Use GPU kernels that add in a fixed order, if torch has them; a CPU's all do."""
    if device.type != "cuda":
        yield
        return
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic
    filling.fill_uninitialized_memory = False  # nothing reads it, and it takes time
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)


T = TypeVar("T")


class Device:
    """Runs functions one after the other in a worker thread."""

    _open: ClassVar[WeakSet[Device]] = WeakSet()
    _before: ClassVar[int] = 0
    """The threads that torch used before the first of the open ones was made."""
    _cores: ClassVar[int] = 0
    """Those that it uses since then."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads` is the number of cores that torch uses; None leaves torch's own choice, up to
        those that this process may use. Without a GPU the caller's thread, and threads that begin
        later, use one until `close`.
        """
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        if not Device._open:
            Device._before = torch.get_num_threads()
            Device._cores = _threads()
        Device._open.add(self)
        count = threads or Device._cores
        self._pool.submit(_use_cores, count).result()
        if torch.cuda.is_available():
            never_spin()
        else:
            _compute_alone()
            if count > 1:
                watch(self._pool.submit(threading.get_native_id).result(), count)
        self.colocation: ColocationLock | None = None
        """The lock shared with an engine process that uses the same accelerator."""
        self.busy = 0.0
        """Seconds of all work so far."""

    async def run(self, function: Callable[..., T], *args: Any, weights_follow: bool = False) -> T:
        """Run `function(*args)` in the device's thread, after the work requested before.
        `weights_follow`: see `turn`.
        """
        async with self.turn(weights_follow=weights_follow):
            return await self.amid_turn(function, *args)

    @asynccontextmanager
    async def turn(self, *, weights_follow: bool = False) -> AsyncIterator[None]:
        """Reserve the device for several calls of the trainer: an engine that shares it pauses
        inside. `weights_follow`: see `ColocationLock.for_trainer`.
        """
        if self.colocation is None:
            yield
            return
        async with self.colocation.for_trainer(weights_follow=weights_follow):
            try:
                yield
            finally:
                torch.cuda.empty_cache()  # the engine needs the memory that torch has cached

    async def amid_turn(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function without waiting for the device's turn."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._work, function, *args)

    def _work(self, function: Callable[..., T], *args: Any) -> T:
        began = time.monotonic()
        try:
            return function(*args)
        finally:
            self.busy += time.monotonic() - began

    def close(self) -> None:
        """End the thread after the running work."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self in Device._open:  # else closed before
            Device._open.discard(self)
            if not Device._open:
                torch.set_num_threads(Device._before)


def use_all_cores() -> None:
    """Let torch's operators use the process's cores in the calling thread too, where it computes
    for long while the device's does.
    """
    _use_cores(Device._cores or torch.get_num_threads())


def _threads() -> int:
    """Return how many threads torch uses: the user's choice, or as many as there are cores."""
    chosen = any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    return torch.get_num_threads() if chosen else min(torch.get_num_threads(), cores())


def _use_cores(count: int) -> None:
    torch.get_num_threads()  # a thread's first call of it takes over the process's last setting
    torch.set_num_threads(count)


_PAUSE_HARD = 2


def _compute_alone() -> None:
    """Make torch's operators use the calling thread alone, and free its pool of threads; so do
    threads that begin later. Threads that compute already have theirs.

    OpenMP has a pool for each thread that computed in parallel. Where all have more threads than
    there are cores, it puts idle ones to sleep after each operation, and to wake one takes as long
    as a small operation: a decode step on two cores takes up to 1.4 times as long.
    """
    torch.set_num_threads(1)
    pause = getattr(openmp(), "omp_pause_resource_all", None)
    if pause is not None:  # of OpenMP 5
        pause(_PAUSE_HARD)

"""Buffer: carries experiences from the explorer to the trainer.

- A group (all experiences of one task in one explore step) enters in one `put` and is never split
  before its advantages are known.
- Nothing is lost or doubled: `state` holds the experiences that were put and not taken; `commit`
  reports that those taken before it are safely in a checkpoint.
- `put` and `take` have time limits, are woken by every change, and know whether a take waits for
  more than will come. All time comes from a clock that a test can replace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trireme.config.schema_rollout import ExperienceBufferConfig
from trireme.experience import Experience

if TYPE_CHECKING:
    from trireme.buffer.record import Record

DEFAULTS = ExperienceBufferConfig()
"""The default limits of a store."""


class Closed(EOFError):
    """The buffer is closed and empty: the end of the run, not a failure."""


class OtherSideFailed(RuntimeError):
    """A put or take cannot continue, because of the failure that is its `__cause__`."""


class Puts(Protocol):
    """The side of a buffer that an explorer uses, in this process or another."""

    async def put(self, experiences: Sequence[Experience]) -> None:
        """Add the experiences of one explore step, whole groups, in one transaction.

        Waits while the buffer is full (back-pressure). Raises Closed after `close`.
        """
        ...

    async def fail(self, error: BaseException) -> None:
        """Report that the run has failed: every waiting caller, here or in another process, gets
        the cause.
        """
        ...

    async def close(self) -> None:
        """Allow no more `put`, and wake all waiting callers."""
        ...


class Buffer(Puts, Protocol):
    """A store with three verbs, and the state that a resume needs."""

    demand: Demand
    """Whether a take waits."""

    async def take(self, n: int, *, oldest: float = 0) -> list[Experience]:
        """Return n experiences; fewer only if the buffer is closed and these are its last.

        Experiences of groups older than the version `oldest` (`Experience.is_older`) are none of
        the n: those that it meets leave the buffer for good, and are returned with the others.
        Waits for more; raises TimeoutError naming the buffer, the requested and the available
        number after `max_read_timeout` seconds without a new one; raises Closed when closed and
        empty.
        """
        ...

    async def take_step(self) -> list[Experience]:
        """Return all experiences of one `put`, in a store that keeps puts separate; waits like
        `take`.
        """
        ...

    async def starves(self) -> bool:
        """Return whether a take, here or in another process, waits for more than there is."""
        ...

    async def without_reader(self) -> str:
        """Return the end of a sentence, which begins with a semicolon: the readers in other
        processes that are known to be gone without having ended; empty if there are none.
        """
        ...

    def __len__(self) -> int:
        """Return the number of experiences that can be taken now."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the store's counts, such as groups that had no room."""
        ...

    def commit(self) -> None:
        """Note that the checkpoint of the last `state` is whole: everything taken before it is
        final.

        Experiences taken after that `state` are not; a take may be running.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Values: JSON, or bytes (written to a separate
        file). `waiting`, if there, counts the experiences in it that are still to be trained: a
        continued run counts its steps by it.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        ...


class Clock(Protocol):
    """A source of time, and a way to wait."""

    def now(self) -> float:
        """Seconds, from any start."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        ...


class WallClock:
    """The real clock."""

    def now(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await asyncio.sleep(seconds)


class Demand:
    """The state of a take that waits for more than there is.

    The store updates it on the event loop: a check that found too few sets it, if nothing was put
    since the check began, and the next put or the take's end resets it. Other threads and the clock
    cause no other changes.
    """

    def __init__(self) -> None:
        self.unmet = False
        self.changed: Callable[[], None] = lambda: None
        """Called at every change; the reader of `unmet` sets it."""

    def set(self, unmet: bool) -> None:
        """Set the state. Call it from the event loop's own thread."""
        if unmet != self.unmet:
            self.unmet = unmet
            self.changed()


class Condition:
    """A condition variable of one event loop, whose waits can also end by a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiters: set[asyncio.Event] = set()
        self.notified = 0

    def notify_all(self) -> None:
        """Wake everyone, from the event loop's own thread."""
        self.notified += 1
        for event in self._waiters:
            event.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for the next notification (True) or for `seconds` (False)."""
        event = asyncio.Event()
        self._waiters.add(event)
        waits = {
            asyncio.ensure_future(event.wait()),
            asyncio.ensure_future(self._clock.sleep(seconds)),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.discard(event)
            for waiting in waits:
                waiting.cancel()
        return event.is_set()

    async def until(
        self,
        ready: Callable[[], bool],
        *,
        timeout: float,
        since: Callable[[], float],
        waited_for: Callable[[], str],
    ) -> None:
        """Wait until `ready()` is true, checked after each notification.

        Raises TimeoutError with `waited_for()` once the clock is `timeout` past `since()`.
        """
        while not ready():
            left = since() + timeout - self._clock.now()
            if left <= 0:
                raise TimeoutError(waited_for())
            await self.wait(left)


@dataclass(eq=False, repr=False)
class InMemory:
    """The common part of the stores of one process: their limits, their clock, and their end."""

    name: str
    _: KW_ONLY
    capacity: int = DEFAULTS.capacity
    max_read_timeout: float = DEFAULTS.max_read_timeout
    record: Record | None = None
    """Receives a copy of each experience that is put."""
    clock: Clock = field(default_factory=WallClock)

    def __post_init__(self) -> None:
        self.demand = Demand()
        self._changed = Condition(self.clock)
        self._closed = False
        self._failure: BaseException | None = None
        self._last_put = self.clock.now()

    def __len__(self) -> int:
        raise NotImplementedError

    async def close(self) -> None:
        """Close the store, and wake all waiting callers."""
        self._closed = True
        self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Report that the other side has failed: current and later callers of put and take get
        `error` as the cause.
        """
        self._failure = self._failure or error
        await self.close()

    async def starves(self) -> bool:
        """Return whether a take waits for more than there is."""
        return self.demand.unmet

    async def without_reader(self) -> str:
        """Return nothing: its reader is in this process."""
        return ""

    def commit(self) -> None:
        """Do nothing: this store retains nothing that was taken."""

    def _stop_if_closed(self) -> None:
        self._stop_if_failed()
        if self._closed:
            raise Closed(f"buffer '{self.name}' is closed")

    def _stop_if_failed(self) -> None:
        if self._failure is not None:
            raise OtherSideFailed(
                f"buffer '{self.name}': the other side has failed: {self._failure}"
            ) from self._failure

    def _starved(self, n: int, has: int, oldest: float) -> str:
        return (
            f"the trainer requested {n} experiences{of_versions(oldest)} of buffer '{self.name}', "
            f"which has {has}, and no new one came for {self.max_read_timeout:g} s "
            "(max_read_timeout)"
        )


def of_versions(oldest: float) -> str:
    """Describe which versions a take accepts, for a message; empty if all."""
    return f" of version {oldest:g} or later" if oldest > 0 else ""

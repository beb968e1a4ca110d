"""Buffer: carries experiences from the explorer to the trainer.

- A group (all experiences of one task in one explore step) enters in one `put` and is never split
  before its advantages are known.
- Nothing is lost or doubled: `state` holds what was put and not taken, `commit` says that what was
  taken before it is safely in a checkpoint.
- `put` and `take` wait no longer than they may, are woken by every change, and know whether more is
  asked for than will come. All time comes from a clock that a test can replace.
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
"""What a store's limits are where nothing is said of them."""


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
        """The run has failed: everyone who waits, here or in another process, gets the cause."""
        ...

    async def close(self) -> None:
        """No more `put`; wakes everyone who waits."""
        ...


class Buffer(Puts, Protocol):
    """Three verbs, and what a resume needs."""

    demand: Demand
    """Whether a take waits."""

    async def take(self, n: int) -> list[Experience]:
        """n experiences; fewer only when the buffer is closed and these are its last.

        Waits for more; raises TimeoutError naming the buffer, how many were wanted and how many it
        has after `max_read_timeout` seconds without a new one; raises Closed when closed and empty.
        """
        ...

    async def take_step(self) -> list[Experience]:
        """All experiences of one `put`, in a store that keeps them apart; waits like `take`."""
        ...

    def __len__(self) -> int:
        """How many experiences can be taken now."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the store's counts, such as groups that had no room."""
        ...

    def commit(self) -> None:
        """The checkpoint of the last `state` is whole: what was taken before it is final.

        What was taken after that `state` is not; a take may be under way.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must store. Values: JSON, or bytes (written to a file of their
        own).
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Back to where `state` was taken."""
        ...


class Clock(Protocol):
    """A clock: the time, and a way to let it pass."""

    def now(self) -> float:
        """Seconds, from any start."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        ...


class WallClock:
    """The real time."""

    def now(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await asyncio.sleep(seconds)


class Demand:
    """The state of a take that waits for more than there is.

    The store says so on the event loop: a look that found too few makes it so, if nothing was put
    since that look began, and the next put or the take's end makes it not so. What another thread
    or the clock does never shows in between.
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
    """A condition variable of one event loop, whose waits end by a clock too."""

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
        """Until the next notification (True) or for `seconds` (False)."""
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
        """Until `ready()`, looked at after each notification.

        Raises TimeoutError saying `waited_for()` once the clock is `timeout` past `since()`.
        """
        while not ready():
            left = since() + timeout - self._clock.now()
            if left <= 0:
                raise TimeoutError(waited_for())
            await self.wait(left)


@dataclass(eq=False, repr=False)
class InMemory:
    """The common part of the stores of one process: their limits, their clock, and how they end."""

    name: str
    _: KW_ONLY
    capacity: int = DEFAULTS.capacity
    max_read_timeout: float = DEFAULTS.max_read_timeout
    record: Record | None = None
    """Gets a copy of each experience that is put."""
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
        """Close the store, and wake everyone who waits."""
        self._closed = True
        self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """The other side has failed: who puts or takes, now or later, gets `error` as the cause."""
        self._failure = self._failure or error
        await self.close()

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

    def _starved(self, n: int) -> str:
        return (
            f"the trainer wanted {n} experiences of buffer '{self.name}', which has {len(self)}, "
            f"and no new one came for {self.max_read_timeout:g} s (max_read_timeout)"
        )

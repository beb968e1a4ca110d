"""Waiting: how a buffer's put and take wait: woken by a change, never longer than they may; and
whether a take waits for more than there is.

All time comes from a clock that a test can replace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """What time it is, and how to let it pass."""

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
    """Whether a take waits for more than there is.

    The store says so on the event loop: a look that found too few makes it so, if nothing was put
    since that look began, and the next put or the take's end makes it not so. What another thread
    or the clock does never shows in between.
    """

    def __init__(self) -> None:
        self.unmet = False
        self.changed: Callable[[], None] = lambda: None
        """Called at every change; whoever looks at `unmet` sets it."""

    def set(self, unmet: bool) -> None:
        """From the event loop's own thread."""
        if unmet != self.unmet:
            self.unmet = unmet
            self.changed()


class Bell:
    """Wakes all who wait on it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rung: set[asyncio.Event] = set()
        self.rings = 0

    def ring(self) -> None:
        """Wake everyone, from the event loop's own thread."""
        self.rings += 1
        for event in self._rung:
            event.set()

    async def wait(self, seconds: float) -> bool:
        """Until the next ring (True) or for `seconds` (False)."""
        event = asyncio.Event()
        self._rung.add(event)
        waits = {
            asyncio.ensure_future(event.wait()),
            asyncio.ensure_future(self._clock.sleep(seconds)),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._rung.discard(event)
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
        """Until `ready()`, looked at after each ring.

        Raises TimeoutError saying `waited_for()` once the clock is `timeout` past `since()`.
        """
        while not ready():
            left = since() + timeout - self._clock.now()
            if left <= 0:
                raise TimeoutError(waited_for())
            await self.wait(left)

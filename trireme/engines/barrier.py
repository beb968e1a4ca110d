"""Barrier: lets an engine compute only when every live rollout waits for it, in deterministic mode.

The composition of a batch changes floating-point sums, and byte-equal runs need every step to see
the same requests. So no rollout may be between two requests, at a moment that depends on how fast
its code is, while the engine computes. The explorer registers rollouts; the engine asks `open`.

Invariants:
- The time that a rollout waits for the others does not count as its own: `held` returns it, so that
  only a rollout that hangs itself runs into its time-out.
- A rollout that `asks_once` is waited for until it has its reply, and no longer: its reward may
  take seconds. If that fails, and the rollout is tried again, its request enters when every other
  rollout has ended or waits for the same (`again`): how fast rewards are decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trireme.log import get_logger

Key = tuple[Any, ...]
"""(batch, task, run)."""
logger = get_logger("explorer")


class RolloutBarrier:
    """Counts live rollouts. Used from one event loop only, so that it needs no lock."""

    def __init__(self) -> None:
        self.live: set[Key] = set()
        """The rollouts that may request something."""
        self.begun: set[Key] = set()
        """The rollouts that have not ended: these, and those that need no further reply."""
        self._once: dict[Key, Callable[[], None]] = {}
        self._again: dict[Key, asyncio.Future[None]] = {}
        """The rollouts that wait to be tried again."""
        self._listeners: list[Callable[[], None]] = []
        self._begins: list[Callable[[], bool]] = []
        self._held: dict[Key, float] = {}
        """Seconds that live rollouts have waited, without those since `_since`."""
        self._since: dict[Key, float] = {}
        self._closed_since: float | None = None
        self._waited = 0.0
        self._warned: set[str] = set()

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake()` whenever a rollout ends, since the barrier may open then."""
        self._listeners.append(wake)

    def wait_while(self, begins: Callable[[], bool]) -> None:
        """Stay closed while `begins()`: a rollout is about to begin, and how soon it does must not
        decide which requests are computed together.
        """
        self._begins.append(begins)

    def wake(self) -> None:
        """Let those that are tried again go on, if it is time to, and make the engine ask again
        whether the barrier is open.
        """
        if self._again and self._again.keys() == self.begun and not self._one_begins():
            again, self._again = self._again, {}
            self.live |= again.keys()
            for future in again.values():
                if not future.done():  # its rollout may have been cancelled
                    future.set_result(None)
        for wake in self._listeners:
            wake()

    @contextmanager
    def rollout(self, key: Key) -> Iterator[None]:
        """Register `key` (batch, task, run) as live inside the block."""
        self.live.add(key)
        self.begun.add(key)
        try:
            yield
        finally:
            self.live.discard(key)
            self.begun.discard(key)
            for by_key in (self._again, self._held, self._since):
                by_key.pop(key, None)
            self.answered(key)
            self.wake()

    def asks_once(self, key: Key, then: Callable[[], None]) -> None:
        """Note that the next reply to a live rollout is the last that it needs; call `then()` when
        it has come, or the rollout ends.
        """
        self._once[key] = then

    def needs_no_more(self, key: Key) -> bool:
        """Return whether the next reply to a rollout is the last that it needs."""
        return key in self._once

    def answered(self, key: Key) -> None:
        """Note that a rollout has the replies to all its requests."""
        if (then := self._once.pop(key, None)) is not None:
            self.live.discard(key)
            then()

    async def again(self, key: Key) -> None:
        """Wait until a rollout may be tried again, and make it live."""
        if key not in self.live:
            self._again[key] = asyncio.get_running_loop().create_future()
            waits = self._again[key]
            self.wake()
            await waits

    def is_trying(self, key: Key) -> bool:
        """Return whether a rollout is live, or waits to be tried again."""
        return key in self.live or key in self._again

    def open(self, waiting: Iterable[Key]) -> bool:
        """Return whether every live rollout has a request waiting at the engine, and none is about
        to begin.
        """
        ready = {key[:3] for key in waiting}
        if more := ready & (self.begun - self.live):
            self._warn(
                more,
                "asked the model again, and its workflow has `one_call`: expected "
                "`one_call = False` in its class; without it two runs of the same seed may differ",
            )
            self.live |= more
        is_open = self.live <= ready and not self._one_begins()
        if is_open or not self.live:
            self._waited, self._closed_since = self.waited, None
        elif self._closed_since is None:
            self._closed_since = time.monotonic()
        for key in [key for key in self._since if is_open or key not in ready]:
            self._held[key] = self.held(key)
            del self._since[key]
        for key in () if is_open else ready & self.live:
            self._since.setdefault(key, time.monotonic())
        return is_open

    @property
    def waited(self) -> float:
        """Return the seconds so far in which the engine computed nothing, since rollouts were busy
        with their own code.
        """
        since = self._closed_since
        return self._waited + (0.0 if since is None else time.monotonic() - since)

    def held(self, key: Key) -> float:
        """Return the seconds that a live rollout has waited here for the others."""
        since = self._since.get(key)
        now = 0.0 if since is None else time.monotonic() - since
        return self._held.get(key, 0.0) + now

    def waits_for(self, key: Key) -> float:
        """Return the seconds for which the engine and other rollouts have waited, if a live rollout
        is among those that they wait for.
        """
        if self._closed_since is None or not self._since:
            return 0.0
        waiting = key in self._since or key not in self.live
        return 0.0 if waiting else time.monotonic() - self._closed_since

    def _one_begins(self) -> bool:
        return any(begins() for begins in self._begins)

    def warn_of_calls_at_once(self, key: Key) -> None:
        """Report, once, a rollout that goes on with one reply while it waits for another: nobody
        can wait for what it asks for next.
        """
        self._warn(
            [key],
            "calls the model again before all of its earlier calls have ended: two runs of the "
            "same seed may differ, unless its calls follow one another, or `n` samples are asked "
            "for at once",
        )

    def _warn(self, keys: Iterable[Key], what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("rollout %s %s", "/".join(map(str, min(keys, key=str))), what)

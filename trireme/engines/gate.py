"""Gate: holds the engine's next step until every live rollout waits on it.

Deterministic mode only. A batch's make-up changes floating-point sums, so that byte-equal runs need
every step to see the same requests. The explorer counts rollouts in and out; the engine asks
`open`. Time that a rollout is held for the others is not its own: `held` says how much, so that one
that hangs runs into its time-out alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Gate:
    """Counts live rollouts. Used from one event loop only, so that it needs no lock."""

    def __init__(self) -> None:
        self.live: set[tuple[Any, ...]] = set()
        self._listeners: list[Any] = []
        self._held: dict[tuple[Any, ...], float] = {}
        """Seconds of live rollouts, without those since `_since`."""
        self._since: dict[tuple[Any, ...], float] = {}

    def on_change(self, wake: Any) -> None:
        """`wake()` is called whenever a rollout ends, since the gate may open by it."""
        self._listeners.append(wake)

    @contextmanager
    def rollout(self, key: tuple[Any, ...]) -> Iterator[None]:
        """`key` (batch, task, run) is live inside."""
        self.live.add(key)
        try:
            yield
        finally:
            self.live.discard(key)
            self._held.pop(key, None)
            self._since.pop(key, None)
            for wake in self._listeners:
                wake()

    def open(self, waiting: Iterable[tuple[Any, ...]]) -> bool:
        """Whether every live rollout is among those with a request at the engine."""
        ready = {key[:3] for key in waiting}
        is_open = self.live <= ready
        for key in [key for key in self._since if is_open or key not in ready]:
            self._held[key] = self.held(key)
            del self._since[key]
        for key in () if is_open else ready & self.live:
            self._since.setdefault(key, time.monotonic())
        return is_open

    def held(self, key: tuple[Any, ...]) -> float:
        """Seconds that a live rollout has waited here for the others."""
        since = self._since.get(key)
        now = 0.0 if since is None else time.monotonic() - since
        return self._held.get(key, 0.0) + now

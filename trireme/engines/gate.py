"""Gate: holds the engine's next step until every live rollout waits on it.

Deterministic mode only. A batch's make-up changes floating-point sums, so that byte-equal runs need
every step to see the same requests. The explorer counts rollouts in and out; the engine asks
`open`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Gate:
    """Counts live rollouts. Used from one event loop only, so that it needs no lock."""

    def __init__(self) -> None:
        self.live: set[tuple[Any, ...]] = set()
        self._listeners: list[Any] = []

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
            for wake in self._listeners:
                wake()

    def open(self, waiting: Iterable[tuple[Any, ...]]) -> bool:
        """Whether every live rollout is among those with a request at the engine."""
        return self.live <= {key[:3] for key in waiting}

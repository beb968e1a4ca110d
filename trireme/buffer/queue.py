"""QueueBuffer: carries experiences in memory, first in first out, within one process.

Invariants:
- `capacity` counts puts (explore steps). A put waits while as many are still in the queue, unless
  the trainer waits for more than there is: then both would wait forever.
- `state` holds every experience that was put and not taken, as bytes: a resume loses and duplicates
  none.
- A take after `close` may return fewer than requested: the rest of an epoch is one smaller batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from trireme.buffer.buffer import Closed, InMemory
from trireme.buffer.store import StoreParts
from trireme.config import Problem
from trireme.config.schema_rollout import ExperienceBufferConfig
from trireme.experience import Experience
from trireme.log import get_logger
from trireme.serialize import decode, encode

logger = get_logger("queue_experience_buffer")


class QueueStore:
    """The store that is a queue in memory."""

    between_processes = False
    keeps_steps = True

    def place(self, path: str, name: str) -> str:
        """Return the path of its human-readable copy."""
        return path or "experience_buffer.jsonl"

    def examine(
        self, config: ExperienceBufferConfig, key: str, path: str, seed: int
    ) -> Iterable[Problem]:
        """Return no problems."""
        return ()

    def make(self, parts: StoreParts) -> QueueBuffer:
        """Make the queue, with its copy."""
        return QueueBuffer(
            parts.config.name,
            capacity=parts.config.capacity,
            max_read_timeout=parts.config.max_read_timeout,
            record=parts.copy(),
        )


class QueueBuffer(InMemory):
    """A bounded queue with back-pressure."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._puts: deque[deque[Experience]] = deque()
        self._wanted, self._oldest = 0, 0.0
        self._last_take = self.clock.now()

    async def put(self, experiences: Sequence[Experience]) -> None:
        """Add the experiences of a step. Raises TimeoutError when nothing is taken for
        `max_read_timeout` seconds.
        """
        begun = self.clock.now()
        await self._changed.until(
            lambda: self._closed or len(self._puts) < self.capacity or self._lacks(),
            timeout=self.max_read_timeout,
            since=lambda: max(begun, self._last_take),
            waited_for=lambda: (
                f"buffer '{self.name}' is full ({self.capacity} explore steps) and "
                f"the trainer took nothing for {self.max_read_timeout:g} s (max_read_timeout)"
            ),
        )
        self._stop_if_closed()
        if not experiences:
            return
        if self.record is not None:
            await self.record.write(experiences)
        # Last, and without an await after it: a reader that takes the explorer's state and ours
        # together finds a step either still running or here, never both.
        self._puts.append(deque(experiences))
        logger.info("%d experiences put, %d wait", len(experiences), len(self))
        self._last_put = self.clock.now()
        self.demand.set(self._lacks())
        self._changed.notify_all()

    async def take(self, n: int, *, oldest: float = 0) -> list[Experience]:
        """Take `n` experiences, waiting for them; fewer at the end. Older ones on the way are taken
        too.
        """
        await self._wait_for(n, oldest)
        taken: list[Experience] = []
        while n > 0 and self._puts:
            taken.append(self._pop())
            n -= not taken[-1].is_older(oldest)
        self._taken()
        logger.info("%d experiences taken, %d wait", len(taken), len(self))
        return taken

    async def take_step(self) -> list[Experience]:
        """Take the rest of the oldest put, waiting for one."""
        await self._wait_for(1)
        taken = list(self._puts.popleft())
        self._taken()
        logger.info("%d experiences taken, %d wait", len(taken), len(self))
        return taken

    async def _wait_for(self, n: int, oldest: float = 0) -> None:
        """Wait until there are n experiences, or the last ones. Raises Closed if there are none."""
        begun = self.clock.now()
        self._wanted, self._oldest = n, oldest
        if self._lacks():
            self.demand.set(True)
            self._changed.notify_all()  # a put that waits for room may be what we need
        try:
            await self._changed.until(
                lambda: self._closed or not self._lacks(),
                timeout=self.max_read_timeout,
                since=lambda: max(begun, self._last_put),
                waited_for=lambda: self._starved(n, self._count(oldest), oldest),
            )
        finally:
            self._wanted, self._oldest = 0, 0.0
            self.demand.set(False)
        self._stop_if_failed()
        if not self._puts:
            raise Closed(f"buffer '{self.name}' is closed and empty")

    def _lacks(self) -> bool:
        """Return True if a take waits for more than there is."""
        return self._wanted > self._count(self._oldest)

    def _count(self, oldest: float) -> int:
        """Count the experiences of that version or later."""
        if oldest <= 0:
            return len(self)
        return sum(not e.is_older(oldest) for experiences in self._puts for e in experiences)

    def _taken(self) -> None:
        self._last_take = self.clock.now()
        self._changed.notify_all()

    def __len__(self) -> int:
        return sum(len(experiences) for experiences in self._puts)

    def metrics(self) -> dict[str, float]:
        """Return nothing: this store counts nothing."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return sizes of the puts and their experiences."""
        untaken = [e for experiences in self._puts for e in experiences]
        sizes = [len(p) for p in self._puts]
        return {"puts": sizes, "waiting": len(untaken), "experiences": encode(untaken)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the experiences of a checkpoint, put by put."""
        left = iter(decode(state["experiences"]))
        self._puts = deque(deque(next(left) for _ in range(size)) for size in state["puts"])

    def _pop(self) -> Experience:
        first = self._puts[0]
        experience = first.popleft()
        if not first:
            self._puts.popleft()
        return experience

"""Buffer: carries experiences from the explorer to the trainer.

Invariants: a group (all experiences of one task in one explore step) enters in one `put` and is
never split before its advantages are known. Nothing is lost or doubled: `state` holds what was
put and not taken, `commit` says that what was taken is safely in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trireme.buffer.waiting import Demand
from trireme.experience import Experience


class Closed(Exception):
    """The buffer is closed and empty: the end of the run, not a failure."""


class OtherSideFailed(RuntimeError):
    """Who puts or takes cannot go on, because of what is its `__cause__`."""


class Buffer(Protocol):
    """Three verbs, and what a resume needs."""

    demand: Demand
    """Whether a take waits."""

    async def put(self, experiences: Sequence[Experience]) -> None:
        """Add the experiences of one explore step, whole groups, in one transaction.

        Waits while the buffer is full (back-pressure). Raises Closed after `close`.
        """
        ...

    async def take(self, n: int) -> list[Experience]:
        """n experiences; fewer only when the buffer is closed and these are its last.

        Waits for more; raises TimeoutError naming the buffer, how many were wanted and how many it
        has after `max_read_timeout` seconds without a new one; raises Closed when closed and empty.
        """
        ...

    async def take_step(self) -> list[Experience]:
        """All experiences of one `put`, in a store that keeps them apart; waits like `take`."""
        ...

    async def fail(self, error: BaseException) -> None:
        """The run has failed: everyone who waits, here or in another process, gets the cause."""
        ...

    async def close(self) -> None:
        """No more `put`; wakes everyone who waits."""
        ...

    def __len__(self) -> int:
        """How many experiences can be taken now."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the store counts, such as groups that had no room."""
        ...

    def commit(self) -> None:
        """A checkpoint now holds what was taken so far: forget it for good."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep. Values: JSON, or bytes (written to a file of their own)."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Back to where `state` was taken."""
        ...

"""Sample: which experiences the next train step gets.

Functions `(buffer, num, *, options)`, awaited. `warmup` is an old name of `default`.
"""

from __future__ import annotations

from typing import Protocol

from trireme.experience import Experience


class Takes(Protocol):
    """What a strategy needs of a buffer."""

    async def take(self, n: int) -> list[Experience]:
        """n experiences."""
        ...

    async def take_step(self) -> list[Experience]:
        """All experiences of the next explore step."""
        ...


async def default(buffer: Takes, num: int) -> list[Experience]:
    """The next `num` in the buffer's own order."""
    return await buffer.take(num)


async def explore_step(buffer: Takes, num: int) -> list[Experience]:
    """All experiences of one explore step, however many: on-policy where episodes differ."""
    return await buffer.take_step()

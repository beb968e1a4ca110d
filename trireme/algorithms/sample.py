"""Sample: which experiences the next train step gets.

Functions `(buffer, num, version, *, options)`, awaited, that return the experiences and metrics;
`version` is that of the newest weights the engine has. `warmup` is an old name of `default`.
"""

from __future__ import annotations

import math
from typing import Protocol

from trireme.experience import Experience

Sample = tuple[list[Experience], dict[str, float]]


class Takes(Protocol):
    """What a strategy needs of a buffer."""

    async def take(self, n: int) -> list[Experience]:
        """n experiences; fewer only when these are the last."""
        ...

    async def take_step(self) -> list[Experience]:
        """All experiences of the next explore step."""
        ...


async def default(buffer: Takes, num: int, version: int) -> Sample:
    """The next `num` in the buffer's own order."""
    return await buffer.take(num), {}


async def explore_step(buffer: Takes, num: int, version: int) -> Sample:
    """All experiences of one explore step, however many: on-policy where episodes differ."""
    return await buffer.take_step(), {}


async def staleness_control(
    buffer: Takes, num: int, version: int, *, max_staleness: float = math.inf
) -> Sample:
    """`num` experiences at most `max_staleness` versions old; older ones are dropped and counted.

    An experience is as old as its oldest sampled token. What no weights sampled is never stale.
    """
    kept: list[Experience] = []
    dropped = 0
    while len(kept) < num:
        wanted = num - len(kept)
        found = await buffer.take(wanted)
        fresh = [e for e in found if e.version < 0 or version - e.version <= max_staleness]
        kept += fresh
        dropped += len(found) - len(fresh)
        if len(found) < wanted and kept:
            break  # the last ones; with none kept, the next take says that it is over
    return kept, {"sample/dropped_stale": float(dropped)}

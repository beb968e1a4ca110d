"""Supply: where a trainer's batches come from: a buffer here, or one in another process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from trireme.algorithms.recipes import Recipe
from trireme.algorithms.sample import Sample
from trireme.buffer.buffer import Buffer


class Supply(Protocol):
    """What a trainer asks of whoever has the experiences."""

    lets_go: bool
    """Whether the `take` that goes on, if it is cancelled now, has taken nothing."""

    async def take(self, version: int) -> Sample:
        """The next batch, as the recipe samples it, and its metrics; `version` is the engine's.

        Raises what Buffer.take raises.
        """
        ...

    async def commit(self) -> None:
        """A checkpoint holds what was taken so far."""
        ...

    async def close(self) -> None:
        """The trainer takes no more."""
        ...


class BufferSupply:
    """Batches of a buffer in this process."""

    def __init__(
        self,
        buffer: Buffer,
        recipe: Recipe,
        batch_size: int,
        *,
        auxiliary: Mapping[str, Buffer] | None = None,
        turn: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Batches of `batch_size`, some of it from `auxiliary` where the recipe mixes.

        `turn()` returns when the trainer may work on what it has got.
        """
        self.buffer = buffer
        self._recipe = recipe
        self._batch_size = batch_size
        self._auxiliary = auxiliary or {}
        self._turn = turn
        self.lets_go = False

    async def take(self, version: int) -> Sample:
        """See Supply."""
        self.lets_go = self._recipe.takes_once
        try:
            batch, metrics = await self._recipe.take(
                self.buffer, self._batch_size, version, self._auxiliary
            )
        finally:
            self.lets_go = False
        if self._turn is not None:
            await self._turn()
        return batch, metrics | self.buffer.metrics()

    async def commit(self) -> None:
        """See Supply."""
        self.buffer.commit()

    async def close(self) -> None:
        """See Supply."""
        await self.buffer.close()

"""Supply: where a trainer's batches come from: a buffer here, or one in another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from trireme.algorithms.recipes import Recipe
from trireme.algorithms.sample import Sample
from trireme.buffer.buffer import Buffer


class Supply(Protocol):
    """What a trainer asks of whoever has the experiences."""

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
        least_batch: int | None = None,
        auxiliary: Mapping[str, Buffer] | None = None,
        waiting: Callable[[bool], None] | None = None,
    ) -> None:
        """A batch of `batch_size` needs `least_batch` experiences of the buffer (all where not
        given); the rest is from `auxiliary`.

        `waiting(True)` is told when a take begins to wait for experiences that are not there.
        """
        self.buffer = buffer
        self._recipe = recipe
        self._batch_size = batch_size
        self._least_batch = batch_size if least_batch is None else least_batch
        self._auxiliary = auxiliary or {}
        self._waiting = waiting or (lambda _: None)

    async def take(self, version: int) -> Sample:
        """See Supply. Nobody may look between the take and the word that it waits no more."""
        short = len(self.buffer) < self._least_batch
        if short:
            self._waiting(True)
        try:
            batch, metrics = await self._recipe.take(
                self.buffer, self._batch_size, version, self._auxiliary
            )
            return batch, metrics | self.buffer.metrics()
        finally:
            if short:
                self._waiting(False)

    async def commit(self) -> None:
        """See Supply."""
        self.buffer.commit()

    async def close(self) -> None:
        """See Supply."""
        await self.buffer.close()

"""Turns: a trainer and an engine process that share one accelerator, of which one works at a time.

- Before the trainer's work the engine pauses, which frees its memory where vLLM can sleep.
- It goes on before whatever is next asked of it, or at once where requests wait in it. Who asks
  while the trainer works waits for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trireme.engines.engine import Engine


class Turns:
    """Between the trainer of this process and one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._resting = False
        self._taken = asyncio.Lock()

    @asynccontextmanager
    async def trainers(self) -> AsyncIterator[None]:
        """The engine rests inside."""
        async with self._taken:
            if not self._resting:
                self._resting = True  # now: who asks while it lies down waits too
                await self._engine.pause()
            yield
        if self._engine.health().waiting:
            await self.engines()

    async def engines(self) -> None:
        """The engine works when this returns."""
        if self._resting:
            async with self._taken:
                if self._resting:
                    await self._engine.resume()
                    self._resting = False

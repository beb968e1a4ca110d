"""Elsewhere: holds what one process of a distributed run gets from the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trireme.buffer.buffer import Buffer
from trireme.experience import Experience
from trireme.sync.synchronizer import Push
from trireme.trainer.trainer import Supply


@dataclass(frozen=True)
class Elsewhere:
    """What one part of a run that is spread over processes has of the others."""

    host: str = "127.0.0.1"
    """This machine, as the others see it."""
    buffer: Buffer | None = None
    supply: Supply | None = None
    push: Push | None = None
    snapshot: Callable[[], Awaitable[dict[str, Any]]] | None = None


class Console(Protocol):
    """Who is told what goes on: a terminal, or another process that has one."""

    def note(self, text: str) -> None:
        """A lasting line."""
        ...

    def step(self, part: str, step: int, metrics: Mapping[str, float]) -> None:
        """A part has done a step."""
        ...

    def rollout(self, experience: Experience) -> None:
        """A rollout to look at."""
        ...

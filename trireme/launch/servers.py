"""Servers: the door to engines of other processes, those that a run starts and the user's own.

An extension brings what is behind it, by the name REMOTE of SERVERS; a run whose engine is in its
own process needs none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from trireme.config import Plan
from trireme.config.engine_kind import REMOTE
from trireme.engines.engine import ServedEngine
from trireme.registry import SERVERS

if TYPE_CHECKING:
    from trireme.sync.push import Pairs
    from trireme.trainer.backend import Backend
    from trireme.trainer.lora import Part

T = TypeVar("T")


class EngineServers(Protocol):
    """Reaches engines of other processes; made without arguments."""

    def engine(self, plan: Plan, urls: Sequence[str], key: str | None) -> ServedEngine:
        """Return the engine behind the servers at these addresses."""
        ...

    async def run(
        self, plan: Plan, model_path: str, use: Callable[[ServedEngine], Awaitable[T]]
    ) -> T:
        """Return what `use` returns of the plan's engine. The processes that the plan asks for are
        started before and ended after it; without any it is behind the user's servers.
        """
        ...

    def pair(self, backend: Backend, *, part: Part, parks: bool) -> Pairs:
        """Make this rank's half of its pair with the engine on its own device. `part`: of the
        weights with LoRA. `parks`: the optimizer's state leaves the device while engines work.
        """
        ...


def engine_servers() -> EngineServers:
    """Return what reaches engines of other processes. Raises ValueError where nothing does."""
    return SERVERS.get(REMOTE)()

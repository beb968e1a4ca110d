"""Group routes: by which a trainer leads an engine's workers through a weight update over a group.

join, then for each update receive and commit. Between the two the engine is paused: it goes on only
when all engines have everything.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol, cast

from fastapi import APIRouter
from pydantic import BaseModel, Field
from torch import Tensor

from trireme.engines.engine import Engine
from trireme.engines.weight_group import Meeting, WeightGroup
from trireme.server.app import JsonRoute
from trireme.server.engine_routes import refuse_older
from trireme.server.rollouts import Rollouts
from trireme.threads import in_thread

MAX_TIMEOUT_S = 86400.0


class VersionBody(BaseModel):
    """What the new weights are called."""

    version: int = Field(ge=0, lt=2**53)
    begin: bool = False
    """See engine_routes.CommitBody."""


class GroupEngine(Protocol):
    """An engine whose workers are members themselves."""

    group_size: int
    """Its workers."""

    async def join_group(self, meeting: Meeting) -> None:
        """All workers come to the meeting, and wait for the others there."""
        ...

    async def receive_weights(self) -> None:
        """Pause, and take what the trainer broadcasts."""
        ...

    async def commit_weights(self, version: int) -> None:
        """Use it from now on, and go on."""
        ...


class EmbeddedGroup:
    """The same for an engine of this process, which holds new weights back until the commit."""

    group_size = 1

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group: WeightGroup | None = None
        self._tensors: dict[str, Tensor] = {}
        self._resume = False

    async def join_group(self, meeting: Meeting) -> None:
        """See GroupEngine."""

        def join() -> WeightGroup:
            group = WeightGroup(meeting)
            group.connect()
            return group

        self._group = await in_thread(join, name="weight-group")

    async def receive_weights(self) -> None:
        """See GroupEngine."""
        group = self._group
        if group is None:
            raise ValueError("this engine is in no weight group: join one first")
        # paused by an update that failed, the engine still has to go on after this one
        self._resume = self._resume or not self._engine.health().paused
        await self._engine.pause()
        self._tensors = await in_thread(lambda: dict(group.receive()), name="weight-group")

    async def commit_weights(self, version: int) -> None:
        """See GroupEngine."""
        tensors, self._tensors = self._tensors, {}
        await self._engine.update_weights(tensors, version)
        if self._resume:
            self._resume = False
            await self._engine.resume()


def make_router(rollouts: Rollouts) -> APIRouter:
    """See the module."""
    router = APIRouter(prefix="/engine/group", route_class=JsonRoute)
    own: Any = rollouts.engine
    engine = cast(GroupEngine, own) if hasattr(own, "group_size") else EmbeddedGroup(own)

    @router.get("/size")
    async def size() -> dict[str, int]:
        return {"workers": engine.group_size}

    @router.post("/join")
    async def join(meeting: Meeting) -> dict[str, Any]:
        if not 1 <= meeting.rank < meeting.world_size:  # rank 0 is the trainer, and opens a port
            raise ValueError(f"rank is {meeting.rank}: expected 1 to world_size - 1")
        if not 0 < meeting.timeout <= MAX_TIMEOUT_S:
            raise ValueError(
                f"timeout is {meeting.timeout}: expected 0 to {MAX_TIMEOUT_S:g} seconds"
            )
        if not 1 <= meeting.port <= 65535 or meeting.backend not in ("gloo", "nccl"):
            raise ValueError(
                f"port is {meeting.port}, backend {meeting.backend!r:.40}: expected 1 to 65535, "
                "and gloo or nccl"
            )
        await engine.join_group(meeting)
        return asdict(meeting)

    @router.post("/receive")
    async def receive() -> dict[str, str]:
        await engine.receive_weights()
        return {"message": "received"}

    @router.post("/commit")
    async def commit(body: VersionBody) -> dict[str, int]:
        refuse_older(own, body.version, begin=body.begin)
        await engine.commit_weights(body.version)
        return {"version": body.version}

    return router

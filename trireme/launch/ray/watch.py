"""Watch: sees within the heartbeat's time-out that a part has died, and says which and why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from trireme.aio import first_failure
from trireme.launch.ray.remote import answer
from trireme.log import get_logger

logger = get_logger("launcher")

BEATS = 6
"""Heartbeats in a time-out."""
LOOK_S = 3.0
"""Seconds in which a failure's consequences come in, and who is gone can be told."""


class PartDied(RuntimeError):
    """A process of the run is gone."""


@dataclass
class Watched:
    """A part, and what people know it by."""

    name: str
    handle: Any
    """Ray's, of its actor."""
    log: Path
    node: str = ""
    pid: int = 0
    out_of_reach: bool = False
    """Its process or machine does not answer at all; Ray has not said yet that it is dead."""

    async def meet(self) -> None:
        """Learn where it runs."""
        found = await self._ping()
        self.node, self.pid = found["node"], found["pid"]
        logger.info("%s: process %d on node %s", self.name, self.pid, self.node)

    async def beat(self, timeout: float) -> None:
        """One heartbeat. Raises PartDied."""
        try:
            await asyncio.wait_for(self._ping(), timeout)
        except TimeoutError:
            reason = f"it has not answered for {timeout:g} s (cluster.heartbeat_timeout)"
        except RayActorError as error:
            reason = self._reason(error)
        except RuntimeError as error:
            reason = str(error).partition("; the end of ")[0]
        else:
            return
        raise PartDied(f"{self.name} has died: {reason}; its log is {self.log}")

    async def _ping(self) -> dict[str, Any]:
        """An answer; what cannot be reached for a moment is asked again."""
        while True:
            try:
                found = await answer(self.handle.ping.remote())
                self.out_of_reach = False
                return found
            except ActorUnavailableError:
                self.out_of_reach = True
                await asyncio.sleep(0.5)

    def _reason(self, error: RayActorError) -> str:
        if not self.pid:
            return f"it could not start: {str(error).strip().splitlines()[-1]}"
        lost = [node for node in ray.nodes() if node["NodeID"] == self.node and not node["Alive"]]
        if lost:
            return f"its machine {lost[0]['NodeManagerAddress']} is lost"
        if "running low on memory" in str(error):
            return f"process {self.pid} was ended for want of memory"
        return f"process {self.pid} is gone"


async def meet_all(parts: Sequence[Watched]) -> None:
    """Learn where those run that have not said it yet."""
    await asyncio.gather(*(part.meet() for part in parts if not part.pid))


async def watch(parts: Sequence[Watched], timeout: float) -> None:
    """For ever; raises PartDied for the first that has."""

    async def one(part: Watched) -> None:
        while True:
            await part.beat(timeout)
            await asyncio.sleep(timeout / BEATS)

    await first_failure(*(one(part) for part in parts))


async def who_died(parts: Sequence[Watched], timeout: float) -> PartDied | None:
    """The parts that are gone, in one sentence. Who is only busy for LOOK_S is not.

    Of who is out of reach Ray has to say within `timeout` whether it is dead.
    """
    beats = [asyncio.ensure_future(part.beat(timeout)) for part in parts]
    await asyncio.wait(beats, timeout=LOOK_S)
    late = [beat for part, beat in zip(parts, beats, strict=True) if part.out_of_reach]
    if late:
        await asyncio.wait(late)
    for beat in beats:
        beat.cancel()
    found = await asyncio.gather(*beats, return_exceptions=True)
    dead = [error for error in found if isinstance(error, PartDied)]
    return PartDied("; ".join(map(str, dead))) if dead else None

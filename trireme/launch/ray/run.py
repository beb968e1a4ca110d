"""Run: one plan as actors: engines, coordinator, trainer and explorer, from start to end.

The whole main is `_both`; what dies on the way is said in one sentence, and nothing stays behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from trireme.buffer.buffer import OtherSideFailed
from trireme.config import Plan
from trireme.config.lookup import plugin_files
from trireme.engines.device import Device
from trireme.launch.ray.actors import EnginePart, ExplorerPart, FollowerPart, HostActor, TrainerPart
from trireme.launch.ray.cluster import Places, cluster
from trireme.launch.ray.coordinator import Coordinator, Events
from trireme.launch.ray.made import Made
from trireme.launch.ray.proxies import Peer
from trireme.launch.ray.watch import Watched, meet_all, watch, who_died
from trireme.launch.session import Session
from trireme.launch.stage_result import StageResult
from trireme.launch.stop import Stop
from trireme.monitor.console import Console
from trireme.serialize import decode

GRACE_S = 3.0
"""Seconds in which a failure's consequences come in, so that the cause can be told from them."""
STOP_S = 15.0


async def run_on_ray(
    plan: Plan, model_path: str, console: Console, *, stop: Stop, measure_end: bool = True
) -> StageResult:
    """Run one stage to its end. Raises the first cause where it fails."""
    started = time.monotonic()
    device = Device()
    try:
        with (
            Session(plan, model_path, console, device, measure_end) as session,
            cluster(plan) as own,
        ):
            stop.listen()  # Ray takes SIGTERM for itself
            crew = Crew(session)
            session.stops.append(crew.stop_training)
            stop.gently, stop.waits_for = session.stop, crew.doing
            try:
                await crew.start(may_grow=not own)
                result = await crew.run()
                result.warnings = session.alarm.end()
            finally:
                await crew.stop()
    finally:
        device.close()
    result.seconds = time.monotonic() - started
    return result


class Crew:
    """All processes of one stage."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._plan = session.plan
        self._parts: list[Watched] = []
        self._places: Places | None = None
        self._explorer: Peer | None = None
        self._trainer: Peer | None = None
        self._engines: list[Peer] = []
        self._followers: list[Peer] = []
        self._following: list[asyncio.Future[None]] = []
        self._training = False
        self._asked: asyncio.Future[bool] | None = None

    async def start(self, *, may_grow: bool) -> None:
        """Places, all processes side by side, engines, and the parts that know their addresses."""
        plan, session = self._plan, self._session
        places = self._places = Places(plan)
        await places.ready(may_grow=may_grow, note=session.console.note)
        engines = 0 if plan.engine_urls else plan.num_engines
        for index in range(engines):
            self._engines.append(self._host(f"engine_{index}", places.engine(index), EnginePart))
        control = {"num_cpus": 0}
        middle = Coordinator if plan.mode == "both" else Events
        self._coordinator = self._host("coordinator", control, middle)
        if plan.mode in ("both", "train"):
            self._trainer = self._host("trainer", places.rank(0), TrainerPart)
        for rank in range(1, plan.trainer_ranks):
            name = f"trainer_rank_{rank}"
            self._followers.append(self._host(name, places.rank(rank), FollowerPart))
        measures = session.recipe.from_data and session.eval_tasksets
        if plan.mode in ("both", "explore") or measures:
            self._explorer = self._host("explorer", control, ExplorerPart)
        await self._guarded(self._open())

    async def run(self) -> StageResult:
        """The mode's work, watched."""
        modes = {"both": self._both, "train": self._train, "explore": self._explore}
        pump = asyncio.ensure_future(self._pump())
        work = asyncio.ensure_future(self._guarded(modes[self._plan.mode]()))
        try:
            await asyncio.wait({pump, work}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done() and not isinstance(pump.exception(), RayError):
                pump.result()  # a monitor has failed; a coordinator that is gone, `work` says
            await work
            schema = self._session.recipe.schema
            result = StageResult(self._plan.stage_name, self._plan.mode, schema)
            for peer in filter(None, (self._explorer, self._trainer)):
                result.add(await peer.control("result"))
            return result
        finally:
            for task in (pump, work):
                task.cancel()
            await asyncio.gather(pump, work, return_exceptions=True)
            await self._last_events()

    def stop_training(self) -> bool:
        """Ask the trainer to save and end after its train step; False where it does not train."""
        if self._training and self._trainer is not None:
            self._asked = asyncio.ensure_future(self._trainer.control("stop_training"))
        return self._training

    def doing(self) -> str:
        """What the run would end after, as a noun."""
        return "the trainer's next step and checkpoint" if self._training else "processes to end"

    async def stop(self) -> None:
        """End every process, by force where it does not end, and give the places back."""
        asked = [asyncio.ensure_future(part.peer.control("stop")) for part in self._parts]
        if asked:
            await asyncio.wait(asked, timeout=STOP_S)
        for call in (*asked, *self._following):
            call.cancel()
        # what a rank fails of, rank 0 raises too
        await asyncio.gather(*asked, *self._following, return_exceptions=True)
        for part in self._parts:
            ray.kill(part.peer.handle, no_restart=True)
        if self._places is not None:
            self._places.release()

    async def _both(self) -> None:
        explorer, trainer = self._explorer, self._trainer
        assert explorer is not None and trainer is not None
        step, _ = await trainer.control("standing")
        if step:
            await trainer.control("refresh")
        self._training = True
        await self._all(explorer.data("explore"), trainer.data("train"))
        self._training = False
        await self._coordinator.control("final_push")
        step, _ = await trainer.control("standing")
        await explorer.data("evaluate", step)

    async def _train(self) -> None:
        assert self._trainer is not None
        _, measures_start = await self._trainer.control("standing")
        if self._explorer is not None and measures_start:
            await self._explorer.data("evaluate", 0)
        self._training = True
        await self._trainer.data("train")
        self._training = False
        if self._explorer is not None and self._session.measure_end:
            await self._trainer.control("refresh")
            step, _ = await self._trainer.control("standing")
            await self._explorer.data("evaluate", step)

    async def _explore(self) -> None:
        assert self._explorer is not None
        await self._explorer.data("explore")
        await self._explorer.data("evaluate", None)

    async def _open(self) -> None:
        """The engines first: the others are told where they are."""
        plan, model_path = self._plan, self._session.model_path
        if self._engines:
            plan = dataclasses.replace(plan, engine_key=secrets.token_hex(16))
            opened = (e.data("open", plan, model_path, i) for i, e in enumerate(self._engines))
            urls = await asyncio.gather(*opened)
            plan = self._plan = dataclasses.replace(plan, engine_urls=tuple(urls))
        plugins = tuple(str(p.resolve()) for p in plugin_files(plan.config.plugins))
        trainer = self._trainer.handle if self._trainer else None
        rank0 = None
        if self._trainer and self._followers:
            rank0 = await self._trainer.control("meeting_place")
        made = Made(plan, model_path, plugins, self._coordinator.handle, trainer, rank0)
        for rank, peer in enumerate(self._followers, 1):
            self._following.append(asyncio.ensure_future(peer.data("follow", made, rank)))
        await self._coordinator.data("open", made)
        others = filter(None, (self._trainer, self._explorer))
        opening = asyncio.ensure_future(self._all(*(peer.data("open", made) for peer in others)))
        await self._while_following(opening)

    async def _while_following(self, opening: asyncio.Future[None]) -> None:
        """Until `opening` is done. A rank that fails before it meets rank 0 cannot tell it."""
        try:
            await asyncio.wait({opening, *self._following}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():  # what rank 0 fails of as well, it says better
                await asyncio.wait({opening}, timeout=GRACE_S)
            if not opening.done():
                for rank, follower in enumerate(self._following, 1):
                    if follower.done() and (error := follower.exception()) is not None:
                        raise RuntimeError(f"trainer rank {rank} failed: {error}") from error
            await opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)

    def _host(self, name: str, options: dict[str, Any], part: type) -> Peer:
        """A part in an actor of its own."""
        actor = HostActor.options(**options, runtime_env={"env_vars": _environment()})
        handle = actor.remote(part, os.getcwd())
        file = next((log for start, log in LOG_OF.items() if name.startswith(start)), name)
        log = self._session.folder.log / f"{file}.log"
        peer = Peer(handle)
        self._parts.append(Watched(name, peer, log))
        return peer

    async def _guarded(self, work: Awaitable[None]) -> None:
        """`work`, while all parts live. Raises who has died before what came of that."""
        timeout = self._plan.config.cluster.heartbeat_timeout
        parts = list(self._parts)
        task = asyncio.ensure_future(work)
        guard = asyncio.ensure_future(self._guard(parts, timeout))
        try:
            await asyncio.wait({task, guard}, return_when=asyncio.FIRST_COMPLETED)
            failures = [t.exception() for t in (guard, task) if t.done()]
            for failure in filter(None, failures):
                dead = await who_died(parts, timeout)
                if dead is None and isinstance(failure, RayError):
                    raise RuntimeError(f"Ray: {str(failure).partition(chr(10))[0]}") from failure
                if dead is not None:
                    raise dead from failure
                raise failure
        finally:
            for each in (task, guard):
                each.cancel()
            await asyncio.gather(task, guard, return_exceptions=True)

    async def _guard(self, parts: list[Watched], timeout: float) -> None:
        limit = self._plan.config.cluster.start_timeout
        try:
            await asyncio.wait_for(meet_all(parts), limit)
        except TimeoutError as error:
            missing = ", ".join(part.name for part in parts if not part.pid)
            raise TimeoutError(
                f"{missing}: no process after {limit:g} s (cluster.start_timeout)"
            ) from error
        await watch(parts, timeout)

    async def _all(self, *work: Awaitable[Any]) -> None:
        """Wait for all; of several failures the one that is no other's consequence is raised."""
        tasks = [asyncio.ensure_future(w) for w in work]
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(isinstance(task.exception(), OtherSideFailed) for task in done) and pending:
                await asyncio.wait(pending, timeout=GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failures = [t.exception() for t in tasks if not t.cancelled() and t.exception()]
        failures.sort(key=lambda failure: isinstance(failure, OtherSideFailed))
        for failure in filter(None, failures):
            raise failure

    async def _pump(self) -> None:
        """What the parts report, to the monitors and the console; for ever."""
        while True:
            await self._show(5.0)

    async def _last_events(self) -> None:
        with suppress(asyncio.TimeoutError, RayError):  # of a coordinator that is gone
            await asyncio.wait_for(self._show(0.0), GRACE_S)

    async def _show(self, wait: float) -> None:
        console = self._session.console
        show: dict[str, Callable[..., None]] = {
            "note": console.note,
            "step": self._session.report,
            "rollout": lambda data: self._session.show(decode(data)[0]),
        }
        for kind, *values in await self._coordinator.control("events", wait):
            show[kind](*values)


LOG_OF = {"coordinator": "synchronizer", "trainer_rank": "trainer"}
"""Log files that are not named like the part."""


def _environment() -> dict[str, str]:
    """What the actors' processes need of ours: where modules lie, and one thread each."""
    path = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = ("HF_HUB_OFFLINE", "TRINITY_PLUGIN_DIRS", "TOKENIZERS_PARALLELISM", "OMP_WAIT_POLICY")
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*path, *filter(os.path.isdir, sys.path[:1])])),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **{name: os.environ[name] for name in kept if name in os.environ},
    }

"""Run: runs one plan as actors: engines, trainer and explorer, from start to end.

`launch/modes.py` runs them together, as in one process. A worker's death is reported in one
sentence, and no process is left.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from trireme.aio import GRACE_S, first_failure, running
from trireme.config import Plan
from trireme.config.lookup import plugin_files
from trireme.engines.device import Device
from trireme.explorer.metrics import Evaluated
from trireme.ext.ray.actors import (
    ExplorerWorker,
    FollowerWorker,
    RunSpec,
    SideWorker,
    TrainerWorker,
)
from trireme.ext.ray.cluster import (
    HeadGone,
    Reservation,
    cluster,
    headless,
    python_path,
    watch_head,
)
from trireme.ext.ray.engines import EngineActor, EngineWorker, ServersOfSides
from trireme.ext.ray.remote import (
    PLACES,
    RayActor,
    Warned,
    Watched,
    Worker,
    decode_event,
    meet_all,
    remote,
    watch,
    who_died,
)
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import EngineKeeper, RemoteServers, restarts_of
from trireme.ext.remote.servers import Servers
from trireme.launch.explorer_side import ExplorerSide
from trireme.launch.modes import run_mode
from trireme.launch.results import StageResult
from trireme.launch.stage import Stage, open_stage
from trireme.launch.stop import Stop
from trireme.launch.trainer_side import TrainerSide
from trireme.log import on_stderr
from trireme.monitor.console import Console
from trireme.monitor.events import Noted
from trireme.monitor.terminal import Terminal
from trireme.registry import MODES

STOP_S = 15.0
"""Seconds that the processes get to end, beside those of a checkpoint that is being written."""
T = TypeVar("T")


async def run_on_ray(stage: Stage, stop: Stop, measure_end: bool) -> StageResult:
    """Run an open stage to its end. Raises the first cause of a failure."""
    with cluster(stage.plan) as started_here:
        stop.listen()  # Ray installs its own handler of SIGTERM
        actors = Actors(stage)
        stop.end_work, stop.waits_for = actors.stop_training, actors.doing
        try:
            await actors.start(may_grow=not started_here)
            return await actors.run(measure_end, stop)
        finally:
            await actors.stop()


async def evaluate_on_ray(plan: Plan, rollouts: int | None) -> list[Evaluated]:
    """Run `trireme eval` with the engines of a cluster."""
    device, console = Device(), Console(live=False, output=Terminal(stderr=True))
    try:
        with open_stage(plan, plan.model_path, device, console) as stage, cluster(plan) as here:
            actors = Actors(stage, scratch=plan.config.checkpoint_root_dir)
            try:
                await actors.start(may_grow=not here)
                return await actors.evaluate(rollouts)
            finally:
                await actors.stop()
    finally:
        device.close()


class Actors:
    """All processes of one stage."""

    def __init__(self, stage: Stage, *, scratch: str | None = None) -> None:
        """`scratch`: a folder that other machines delete with their workers."""
        self._stage, self._scratch = stage, scratch
        self._plan = stage.plan
        self._watched: list[Watched] = []
        self._places: Reservation | None = None
        self._trainer: Any = None
        self._explorer: Any = None
        self._followers: list[Any] = []
        """Handles of the actors."""
        self._engines: list[EngineActor] = []
        self._serving: RemoteEngine | None = None
        """The engines as used by the server of agents, which is in this process."""
        self._following: list[asyncio.Future[None]] = []
        self._heard: dict[Any, int] = {}
        """How many events of a worker the run's stream has."""
        self._work: asyncio.Future[StageResult] | None = None
        self._asked: asyncio.Future[None] | None = None
        self._headless = False

    async def start(self, *, may_grow: bool) -> None:
        """Reserve places, start all processes concurrently, then open engines and the two sides."""
        plan, stage = self._plan, self._stage
        places = self._places = Reservation(plan)
        await places.ready(may_grow=may_grow, note=lambda text: stage.emit(Noted(text)))
        engines = 0 if plan.engine.urls else plan.places.num_engines
        for index in range(engines):
            make = partial(self._actor, f"engine_{index}", places.engine(index), EngineWorker)
            self._engines.append(EngineActor(make(), index, make))
        if stage.trains:
            self._trainer = self._actor("trainer", places.rank(0), TrainerWorker).handle
        for rank in range(1, plan.places.trainer_ranks):
            name = f"trainer_rank_{rank}"
            self._followers.append(self._actor(name, places.rank(rank), FollowerWorker).handle)
        measures = stage.recipe.from_data and stage.eval_tasksets
        if plan.mode in ("both", "explore", "bench") or measures:
            self._explorer = self._actor("explorer", places.explorer(), ExplorerWorker).handle
        await self._guarded(self._open())

    async def run(self, measure_end: bool, stop: Stop) -> StageResult:
        """Run the mode's work, watched, while forwarding the workers' events to the run's
        stream.
        """
        sides = [handle for handle in (self._trainer, self._explorer) if handle is not None]
        modes = self._guarded(
            self._kept(self._run_mode(measure_end, stop)), kept=self._restarts() > 0
        )
        try:
            async with running(modes, *map(self._pump, sides)) as tasks:
                work, *pumps = tasks
                self._work = work
                work.add_done_callback(lambda _: [pump.cancel() for pump in pumps])
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for pump in pumps:
                    if pump.done() and not pump.cancelled():
                        pump.result()
                return await work
        finally:
            for handle in sides:
                with suppress(asyncio.TimeoutError, RayError):  # the worker is gone
                    await asyncio.wait_for(self._show(handle, 0.0), GRACE_S)

    async def evaluate(self, rollouts: int | None) -> list[Evaluated]:
        """Run the evaluation tasksets, watched."""
        return await self._guarded(remote(ExplorerWorker, self._explorer).try_all(rollouts))

    def stop_training(self) -> bool:
        """Ask the trainer to save and end after its train step; one that is not training has
        nothing to save, and the work is cancelled. False if no trainer is at work.
        """
        if self._trainer is None or self._work is None or self._work.done():
            return False
        self._asked = asyncio.ensure_future(self._stop_trainer(self._work))
        return True

    def doing(self) -> str:
        """Return the activity that a stopping run still waits for, as a noun."""
        return "the trainer's next step and checkpoint" if self._asked else "processes to end"

    async def stop(self) -> None:
        """End every process, by force if necessary, and release the places."""
        asked = [asyncio.ensure_future(remote(Worker, w.handle).stop()) for w in self._watched]
        if asked:
            saving = self._work is not None and not self._headless
            saves = self._plan.config.cluster.stop_timeout if saving else 0.0
            await asyncio.wait(asked, timeout=STOP_S + saves)
        for call in (*asked, *self._following):
            call.cancel()
        # rank 0 raises a rank's errors too
        await asyncio.gather(*asked, *self._following, return_exceptions=True)
        if self._headless:  # whose machines' own Ray ends what is left
            return
        for watched in self._watched:
            ray.kill(watched.handle, no_restart=True)
        if self._places is not None:
            self._places.release()

    async def _run_mode(self, measure_end: bool, stop: Stop) -> StageResult:
        """Run the mode as in one process, with remote sides; a server of agents is here."""
        stage = self._stage
        if stage.plan.mode in MODES:
            assert self._serving is not None
            return await MODES.get(stage.plan.mode)(stage, self._serving, stop)
        trainer = None if self._trainer is None else remote(TrainerSide, self._trainer)
        explorer = None if self._explorer is None else remote(ExplorerSide, self._explorer)
        return await run_mode(stage, trainer, explorer, measure_end=measure_end)

    async def _stop_trainer(self, work: asyncio.Future[StageResult]) -> None:
        with suppress(RayError):  # it is gone: `work` reports that
            if not await remote(TrainerWorker, self._trainer).stop_training():
                self._asked = None
                work.cancel()

    async def _open(self) -> None:
        """Open the engines first: the others need their addresses."""
        plan, model_path = self._plan, self._stage.model_path
        if self._engines:
            plan = replace(plan, engine=replace(plan.engine, key=secrets.token_hex(16)))
            opened = [engine.open(plan, model_path) for engine in self._engines]
            urls = await asyncio.gather(*opened)
            plan = self._plan = replace(plan, engine=replace(plan.engine, urls=tuple(urls)))
        plugins = tuple(str(p.resolve()) for p in plugin_files(plan.config.plugins))
        trainer = remote(TrainerWorker, self._trainer)
        rank0 = await trainer.meeting_place() if self._followers else None
        restarted = self._restarts() > 0
        if plan.mode in MODES:
            self._serving = RemoteServers().engine(plan, plan.engine.urls, plan.engine.key)
            self._serving.servers.restarted = restarted
        report = self._stage.old_report
        spec = RunSpec(plan, model_path, plugins, self._trainer, rank0, restarted, report)
        for rank, handle in enumerate(self._followers, 1):
            follows = remote(FollowerWorker, handle).follow(spec, rank)
            self._following.append(asyncio.ensure_future(follows))
        opens = [trainer.open(spec)] if self._trainer is not None else []
        if self._explorer is not None:
            opens.append(remote(ExplorerWorker, self._explorer).open(spec))
        if opens:
            await self._while_following(asyncio.ensure_future(first_failure(*opens)))

    async def _while_following(self, opens: asyncio.Future[Any]) -> None:
        """Wait until `opens` is done. A rank that fails before it meets rank 0 cannot
        report to it.
        """
        async with running(opens) as (opening,):
            await asyncio.wait({opening, *self._following}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():  # rank 0 reports a common error better
                await asyncio.wait({opening}, timeout=GRACE_S)
            if not opening.done():
                for rank, follower in enumerate(self._following, 1):
                    if follower.done() and (error := follower.exception()) is not None:
                        raise RuntimeError(f"trainer rank {rank} failed: {error}") from error
            await opening

    def _restarts(self) -> int:
        return restarts_of(self._plan) if self._engines else 0

    async def _kept(self, work: Awaitable[T]) -> T:
        """Run `work`; engines that die are started again."""
        if not self._restarts():
            return await work
        sides = [remote(Servers, h) for h in (self._trainer, self._explorer) if h is not None]
        if self._serving is not None:
            sides = [self._serving.servers]
        return await EngineKeeper(
            self._engines, ServersOfSides(*sides), restarts=self._restarts()
        ).run(work)

    def _actor(self, name: str, options: dict[str, Any], worker: type[Worker]) -> Watched:
        """Start a worker in a separate actor, replacing an older actor of that name."""
        trains = worker in (TrainerWorker, FollowerWorker)
        variables = environment_of(self._plan, trains=trains, explores=worker is ExplorerWorker)
        actor = RayActor.options(**options, runtime_env={"env_vars": variables})
        handle = actor.remote(worker, os.getcwd(), self._scratch)
        file = "trainer" if name.startswith("trainer_rank") else name
        watched = Watched(name, handle, self._stage.folder.log / f"{file}.log")
        self._watched = [each for each in self._watched if each.name != name] + [watched]
        return watched

    async def _guarded(self, work: Awaitable[T], *, kept: bool = False) -> T:
        """Run `work` while all workers live. Raises a worker's death before its consequences.
        `kept`: engines that die are restarted, and are not watched here.
        """
        timeout = self._plan.config.cluster.heartbeat_timeout
        engines = {engine.name for engine in self._engines} if kept else set()
        workers = [worker for worker in self._watched if worker.name not in engines]
        async with running(work, self._guard(workers, timeout), watch_head()) as tasks:
            task, guard, head = tasks
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failures = [t.exception() for t in (head, guard, task) if t.done()]
            for failure in filter(None, failures):
                if not isinstance(failure, HeadGone) and (gone := await headless()) is not None:
                    gone.__cause__, failure = failure, gone
                if isinstance(failure, HeadGone):
                    self._headless = True
                    raise failure
                dead = await who_died(workers, timeout)
                if dead is None and isinstance(failure, RayError):
                    raise RuntimeError(f"Ray: {str(failure).partition(chr(10))[0]}") from failure
                if dead is not None:
                    raise dead from failure
                raise failure
            return task.result()

    async def _guard(self, workers: list[Watched], timeout: float) -> None:
        limit = self._plan.config.cluster.start_timeout
        try:
            await asyncio.wait_for(meet_all(workers), limit)
        except TimeoutError as error:
            missing = ", ".join(worker.name for worker in workers if not worker.pid)
            raise TimeoutError(
                f"{missing}: no process after {limit:g} s (cluster.start_timeout)"
            ) from error
        await watch(workers, timeout)

    async def _pump(self, handle: Any) -> None:
        """Copy a worker's event stream into the run's until the worker is gone."""
        with suppress(RayError):
            while True:
                await self._show(handle, 5.0)

    async def _show(self, handle: Any, wait: float) -> None:
        heard = self._heard.get(handle, 0)
        for encoded in await remote(SideWorker, handle).events(heard, wait):
            self._heard[handle] = heard = heard + 1
            event = decode_event(encoded)
            if isinstance(event, Warned):
                on_stderr(event.text)
            else:
                self._stage.emit(event)


_FORWARDED = (
    "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "VLLM_", "CUDA_", "HF_",
    "TRIREME_PLUGIN_DIRS", "TRINITY_PLUGIN_DIRS", "TOKENIZERS_PARALLELISM", "OMP_WAIT_POLICY",
)  # fmt: skip
"""Prefixes of the variables that control a run, also if Ray was started without them."""
_KEPT_BACK = ("CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP", "VLLM_PORT")
"""Ray's own variables, and those that differ by machine."""
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Parts of names of secrets: Ray shows an actor's environment to everyone who sees its cluster."""


def environment_of(plan: Plan, *, trains: bool, explores: bool = False) -> dict[str, str]:
    """Return the environment variables that an actor's process needs of ours: the paths of modules,
    its number of threads or its machine's places (see `share_cores`), and the settings of the
    network, torch and its engine. `trains`: the process is one of the trainer's. `explores`: it
    gets `explorer.env_vars` from the beginning, except secrets, which it sets itself.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED)
        and name not in _KEPT_BACK
        and (name.startswith("TOKENIZERS_") or not any(part in name for part in _SECRET))
    }
    theirs = plan.config.explorer.env_vars.items() if explores else ()
    own = {n: v for n, v in theirs if n != "PYTHONPATH" and not any(s in n for s in _SECRET)}
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None or plan.device != "cuda":
        variables["OMP_NUM_THREADS"] = threads or "1"
    if plan.device == "cuda":
        variables[PLACES] = str(plan.places.per_node) if threads is None else ""
        # CUDA cannot lend memory of that kind to other processes everywhere
        expands = trains and not plan.sync.takes_turns
        if expands and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(variables):
            # micro-batches differ in size; the name that every torch knows
            variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        if explores and not plan.places.auxiliary:
            # it takes no GPU, and Ray 2.60 shows an actor without one those of all others
            variables["CUDA_VISIBLE_DEVICES"] = ""
    return {
        "PYTHONPATH": python_path(),
        **variables,
        **own,
    }

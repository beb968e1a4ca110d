"""Actors: the parts of a run as Ray's actors. `Host` is the one actor class; it holds a part.

A part is a plain async class, made empty, so that all processes start side by side, and gets its
plan by `open`. Ray gives each concurrency group an event loop of its own; a part is not made for
several. So its work runs on one loop in a thread of ours, and Ray's only hand calls over and wait.
Long calls and bytes (`data`), short ones (`control`) and the heartbeat (`ping`) do not wait for
each other.

- Engine: an engine process on one of the cluster's machines, watched and ended with its actor.
- Explorer: made of the same parts as in one process. It knows the coordinator by proxies and the
  engines by their addresses in the plan.
- Trainer: rank 0. It pushes the weights when the coordinator asks for it, straight to the engines.
- Follower: a trainer rank after the first, which does what rank 0 tells it until rank 0 ends it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import ray

from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.engines.device import Device
from trireme.explorer.explorer import Explorer
from trireme.launch.elsewhere import Elsewhere
from trireme.launch.engine_host import EngineHost, engine_spec
from trireme.launch.local import train_for_others
from trireme.launch.ray.made import Made
from trireme.launch.ray.proxies import (
    ExplorerSide,
    Peer,
    PutSide,
    Relay,
    State,
    TakeSide,
    TrainerSide,
)
from trireme.launch.session import Session
from trireme.launch.stage_result import StageResult
from trireme.launch.trainer_ranks import follow_plan, place_of
from trireme.log import setup_logging
from trireme.sync.synchronizer import Push
from trireme.trainer.ranks import free_address
from trireme.trainer.trainer import Trainer
from trireme.workflows.plugins import load_plugins


class Host:
    """One part in a process of its own."""

    def __init__(self, part: type, folder: str) -> None:
        """`folder`: where the command was given, to which the YAML's paths are relative."""
        with suppress(FileNotFoundError):  # another machine may lack it, and need it for nothing
            os.chdir(folder)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="part", daemon=True).start()
        self._part = part()

    @ray.method(concurrency_group="control")
    async def control(self, name: str, *args: Any) -> Any:
        """A call that carries no experiences."""
        return await self._do(getattr(self._part, name)(*args))

    @ray.method(concurrency_group="data")
    async def data(self, name: str, *args: Any) -> Any:
        """A call that carries experiences, or lasts as long as the run."""
        return await self._do(getattr(self._part, name)(*args))

    @ray.method(concurrency_group="beat")
    async def ping(self) -> dict[str, Any]:
        """Where this process is; raises what the part says is wrong with it."""
        if health := getattr(self._part, "health", None):
            health()
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    async def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


_actor: Any = ray.remote
HostActor: Any = _actor(concurrency_groups={"control": 32, "data": 32, "beat": 4})(Host)


class EnginePart:
    """One engine host; Ray gives this process, and so its child, the engine's GPUs."""

    def __init__(self) -> None:
        self._host: EngineHost | None = None

    async def open(self, plan: Plan, model_path: str, index: int) -> str:
        """Its address, once it serves. Raises what is wrong with it, or TimeoutError."""
        host = EngineHost(
            engine_spec(plan, model_path),
            name=f"engine_{index}",
            log_file=JobFolder(plan.job_dir, plan.explorer_name).log / f"engine_{index}.log",
            python=plan.engine_python if plan.engine_kind == "vllm" else sys.executable,
            host=ray.util.get_node_ip_address(),
            key=plan.engine_key,
            threads=None if plan.device == "cuda" else plan.engine_size,
        )
        host.start()
        self._host = host  # now: a heartbeat may ask at any moment
        return await host.ready(plan.config.cluster.start_timeout)

    def health(self) -> None:
        """Raise RuntimeError where the engine has ended."""
        if self._host is not None:
            self._host.examine()

    async def stop(self) -> None:
        """End the engine, by force where it does not end."""
        host, self._host = self._host, None
        if host is not None:
            await host.stop()


class ExplorerPart:
    """The explorer, told by the launcher what to do."""

    def __init__(self) -> None:
        self._device = Device()
        self._session: Session | None = None
        self._explorer: Explorer | None = None

    async def open(self, made: Made) -> None:
        """Load tokenizer and tasks."""
        load_plugins(made.plugins)
        plan, coordinator = made.plan, Peer(made.coordinator)
        self._relay = Relay(coordinator)
        side = ExplorerSide(coordinator, plan)
        buffer = PutSide(coordinator, side, self._state) if plan.mode == "both" else None
        elsewhere = Elsewhere(buffer=buffer)
        session = Session(
            plan, made.model_path, self._relay, self._device, True, elsewhere=elsewhere
        )
        self._session = await asyncio.to_thread(session.__enter__)
        if plan.mode == "explore":
            sync = session.polled_sync()
            await sync.load_latest()
            self._explorer = session.explorer(sync)
            return
        if session.resumed is not None:
            side.begin_at(session.resumed.run_state["version"])
        self._explorer = session.explorer(side)
        if plan.mode == "both":
            await coordinator.control("begin", self._explorer.state())

    async def explore(self) -> None:
        """See Explorer."""
        await self.explorer.explore()
        await self._relay.flush()

    async def evaluate(self, step: int | None) -> None:
        """All evaluation tasksets; None: as of the explorer's own last step."""
        await self.explorer.evaluate_last(self.explorer.step if step is None else step)
        await self._relay.flush()

    async def result(self) -> StageResult:
        """What the explorer came to."""
        assert self._session is not None
        return StageResult.of(self._session, self.explorer, None)

    async def stop(self) -> None:
        """End the runners, leave the engines, close the files."""
        if self._explorer is not None:
            await self._explorer.close()
        if self._session is not None:
            await self._session.close_engines()
            self._session.__exit__(None, None, None)
        self._device.close()

    @property
    def explorer(self) -> Explorer:
        """The explorer, once it is open."""
        assert self._explorer is not None
        return self._explorer

    def _state(self) -> State:
        return self.explorer.state(putting=True)


class TrainerPart:
    """The trainer, told by the launcher what to do."""

    def __init__(self) -> None:
        self._device = Device()
        self._opened: Session | None = None
        self._sync: TrainerSide | None = None
        self._trainer: Trainer | None = None
        self._push: Push | None = None

    async def meeting_place(self) -> str:
        """HOST:PORT on this machine that the other ranks can reach."""
        return free_address(ray.util.get_node_ip_address())

    async def open(self, made: Made) -> None:
        """Load the model, where the checkpoint left it."""
        load_plugins(made.plugins)
        plan, coordinator = made.plan, Peer(made.coordinator)
        self._relay = Relay(coordinator)
        elsewhere = Elsewhere(host=ray.util.get_node_ip_address())
        if plan.mode == "both":

            async def snapshot() -> State:
                return await coordinator.control("snapshot")

            supply = TakeSide(coordinator)
            elsewhere = dataclasses.replace(elsewhere, supply=supply, snapshot=snapshot)
        place = place_of(plan, 0, plan.trainer_ranks, made.rank0) if made.rank0 else None
        session = Session(
            plan, made.model_path, self._relay, self._device, True, place, elsewhere=elsewhere
        )
        self._opened = await asyncio.to_thread(session.__enter__)
        await self._device.run(lambda: session.backend)
        if plan.mode == "both":
            saved = session.resumed
            version = saved.run_state["version"] if saved else 0
            step = saved.step if saved else 0
            self._sync = TrainerSide(coordinator, version=version, step=step)
        if plan.engine_urls:
            self._push = session.push()
        self._for_others = plan.mode == "train" and not session.recipe.from_data
        own = session.synchronizer if self._for_others else self._sync
        self._trainer = session.trainer(own)

    async def standing(self) -> tuple[int, bool]:
        """The train step that it has come to, and whether the model is as the user gave it."""
        return self.trainer.step, self._session.measures_start

    async def train(self) -> None:
        """See Trainer; explorers of other commands are told how it stands."""
        if self._for_others:
            await train_for_others(self._session, self.trainer)
        else:
            await self.trainer.train()
        await self._relay.flush()

    async def stop_training(self) -> bool:
        """See Trainer.stop."""
        return self.trainer.stop()

    async def push(self, version: int) -> dict[str, float]:
        """The weights to the engines, and the proof that they arrived."""
        assert self._push is not None and self._sync is not None
        step = self.trainer.step
        metrics = await self._push(version)
        self._sync.version, self._sync.pushed_step = version, step
        return metrics

    async def refresh(self) -> None:
        """The engines get the weights as they are, without a push."""
        version = self._sync.version if self._sync else self.trainer.step
        await self._session.refresh_engine(version)

    async def result(self) -> StageResult:
        """What the trainer came to."""
        return StageResult.of(self._session, None, self.trainer)

    async def stop(self) -> None:
        """Leave the engines and close the files."""
        if self._opened is not None:
            if self._opened.plan.engine_urls:
                await self._opened.engine.close()
            self._opened.__exit__(None, None, None)
        self._device.close()

    @property
    def trainer(self) -> Trainer:
        """The trainer, once it is open."""
        assert self._trainer is not None
        return self._trainer

    @property
    def _session(self) -> Session:
        assert self._opened is not None
        return self._opened


class FollowerPart:
    """One rank in a process of its own."""

    async def follow(self, made: Made, rank: int) -> None:
        """Be rank `rank`, from loading to the end. Raises what went wrong here."""
        load_plugins(made.plugins)
        assert made.rank0 is not None
        plan = made.plan
        close_log = setup_logging(plan.job_dir / "log", plan.config.log.level)
        place = place_of(plan, rank, plan.trainer_ranks, made.rank0)
        try:
            await asyncio.to_thread(follow_plan, plan, made.model_path, place)
        except Exception:
            logging.getLogger("trireme.trainer").exception("rank %d has failed", rank)
            raise
        finally:
            close_log()

    async def stop(self) -> None:
        """Rank 0 says when to stop; nothing is left to do."""

"""Trainer: rank 0 in a process of its own, made of the same parts as in one process.

It pushes the weights when the coordinator asks for it: straight from here to the engines.
"""

from __future__ import annotations

import asyncio
import dataclasses

import ray

from trireme.engines.device import Device
from trireme.launch.elsewhere import Elsewhere
from trireme.launch.local import train_for_others
from trireme.launch.ray.host import Peer
from trireme.launch.ray.made import Made
from trireme.launch.ray.proxies import Relay, State, TakeSide, TrainerSide
from trireme.launch.session import Session
from trireme.launch.stage_result import StageResult
from trireme.launch.trainer_ranks import place_of
from trireme.sync.synchronizer import Push
from trireme.trainer.ranks import free_address
from trireme.trainer.trainer import Trainer
from trireme.workflows.plugins import load_plugins


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

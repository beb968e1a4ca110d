"""Trainer: rank 0 in a process of its own, made of the same parts as in one process.

It pushes the weights when the coordinator asks for it: straight from here to the engines.
"""

from __future__ import annotations

import asyncio
from typing import Any

from trireme.config import Plan
from trireme.engines.device import Device
from trireme.launch.ray.host import Peer
from trireme.launch.ray.proxies import Relay, State, TakeSide, TrainerSide
from trireme.launch.session import Elsewhere, Session, StageResult
from trireme.trainer.trainer import Trainer
from trireme.workflows.plugins import load_plugins

LOGS = ("trainer", "checkpoint_monitor")


class TrainerPart:
    """The trainer, told by the launcher what to do."""

    def __init__(self, plan: Plan, model_path: str, plugins: list[str], coordinator: Any) -> None:
        load_plugins(plugins)
        self._plan = plan
        self._coordinator = Peer(coordinator)
        self._relay = Relay(self._coordinator)
        self._device = Device()
        elsewhere = Elsewhere(LOGS)
        if plan.mode == "both":
            supply = TakeSide(self._coordinator)
            elsewhere = Elsewhere(LOGS, supply=supply, snapshot=self._snapshot)
        self._session = Session(plan, model_path, self._relay, self._device, True, elsewhere)
        self._sync: TrainerSide | None = None
        self._trainer: Trainer | None = None

    async def open(self) -> None:
        """Load the model, where the checkpoint left it."""
        session = self._session
        await asyncio.to_thread(session.__enter__)
        await self._device.run(lambda: session.backend)
        if self._plan.mode == "both":
            saved = session.resumed
            version = saved.run_state["version"] if saved else 0
            step = saved.step if saved else 0
            self._sync = TrainerSide(self._coordinator, version=version, step=step)
        self._trainer = session.trainer(self._sync)
        self._push = session.push() if self._plan.engine_urls else None

    async def resumed(self) -> tuple[int, bool]:
        """The train step that the run goes on from; 0 at its beginning."""
        return self.trainer.step, self._session.measures_start

    async def train(self) -> None:
        """See Trainer."""
        await self.trainer.train()
        await self._relay.flush()

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
        return self._session.result(None, self.trainer)

    async def stop(self) -> None:
        """Leave the engines and close the files."""
        if self._trainer is not None:
            if self._plan.engine_urls:
                await self._session.engine.close()
            self._session.__exit__(None, None, None)
        self._device.close()

    @property
    def trainer(self) -> Trainer:
        """The trainer, once it is open."""
        assert self._trainer is not None
        return self._trainer

    async def _snapshot(self) -> State:
        return await self._coordinator.control("snapshot")

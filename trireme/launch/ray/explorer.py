"""Explorer: in a process of its own, made of the same parts as in one process.

It knows the coordinator by proxies and the engines by their addresses in the plan.
"""

from __future__ import annotations

import asyncio
from typing import Any

from trireme.config import Plan
from trireme.engines.device import Device
from trireme.explorer.explorer import Explorer
from trireme.launch.ray.host import Peer
from trireme.launch.ray.proxies import ExplorerSide, PutSide, Relay, State
from trireme.launch.session import Elsewhere, Session, StageResult
from trireme.workflows.plugins import load_plugins


class ExplorerPart:
    """The explorer, told by the launcher what to do."""

    def __init__(self, plan: Plan, model_path: str, plugins: list[str], coordinator: Any) -> None:
        load_plugins(plugins)
        self._plan = plan
        self._coordinator = Peer(coordinator)
        self._relay = Relay(self._coordinator)
        self._device = Device()
        self._sync = ExplorerSide(self._coordinator, plan)
        buffer = (
            PutSide(self._coordinator, self._sync, self._state) if plan.mode == "both" else None
        )
        runners = tuple(f"explorer_runner_{i}" for i in range(plan.runners))
        logs = ("explorer", "explorer_experience_pipeline", *runners)
        elsewhere = Elsewhere(logs, buffer=buffer)
        self._session = Session(plan, model_path, self._relay, self._device, True, elsewhere)
        self._explorer: Explorer | None = None

    async def open(self) -> None:
        """Load tokenizer and tasks."""
        await asyncio.to_thread(self._session.__enter__)
        if self._plan.mode == "explore":
            sync = self._session.polled_sync()
            await sync.load_latest()
            self._explorer = self._session.explorer(sync)
            return
        if self._session.resumed is not None:
            self._sync.begin_at(self._session.resumed.run_state["version"])
        self._explorer = self._session.explorer(self._sync)
        if self._plan.mode == "both":
            await self._coordinator.control("begin", self._explorer.state())

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
        return self._session.result(self.explorer, None)

    async def stop(self) -> None:
        """End the runners, leave the engines, close the files."""
        if self._explorer is not None:
            await self._explorer.close()
            await self._session.engine.close()
            self._session.__exit__(None, None, None)
        self._device.close()

    @property
    def explorer(self) -> Explorer:
        """The explorer, once it is open."""
        assert self._explorer is not None
        return self._explorer

    def _state(self) -> State:
        return self.explorer.state(putting=True)

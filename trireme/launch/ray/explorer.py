"""Explorer: in a process of its own, made of the same parts as in one process.

It knows the coordinator by proxies and the engines by their addresses in the plan.
"""

from __future__ import annotations

import asyncio

from trireme.engines.device import Device
from trireme.explorer.explorer import Explorer
from trireme.launch.elsewhere import Elsewhere
from trireme.launch.ray.host import Peer
from trireme.launch.ray.made import Made
from trireme.launch.ray.proxies import ExplorerSide, PutSide, Relay, State
from trireme.launch.session import Session
from trireme.launch.stage_result import StageResult
from trireme.workflows.plugins import load_plugins


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

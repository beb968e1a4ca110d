"""Coordinator: the part between explorer and trainer: the buffer and the synchronizer.

- What a put carries and where the explorer goes on after it become known in one go: a snapshot
  holds a step's experiences or says that the step is to be done again, never both.
- Calls that wait here end when a side fails or ends.
- What the parts of a run report is kept in order until the command asks for it; by a part of its
  own (`Events`) where explorer and trainer are not of one command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trireme.engines.device import Device
from trireme.experience import Experience
from trireme.launch.elsewhere import Elsewhere
from trireme.launch.ray.made import Made
from trireme.launch.ray.proxies import Peer, State
from trireme.launch.session import Session
from trireme.serialize import decode, encode
from trireme.workflows.plugins import load_plugins


class Events:
    """The other end of Relay."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, ...]] = []
        self._event = asyncio.Event()

    async def open(self, made: Made) -> None:
        """Nothing is needed of the run."""

    async def report(self, event: tuple[Any, ...]) -> None:
        """Something for the console and the monitors."""
        self._events.append(event)
        self._event.set()

    async def events(self, wait: float) -> list[tuple[Any, ...]]:
        """What was reported since the last call; waits for something, `wait` seconds at most."""
        self._event.clear()
        if not self._events:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._event.wait(), wait)
        found, self._events = self._events, []
        return found

    async def stop(self) -> None:
        """Nothing is held."""


class Coordinator(Events):
    """Its calls are those of PutSide, TakeSide, ExplorerSide, TrainerSide and Relay."""

    def __init__(self) -> None:
        super().__init__()
        self._device = Device()
        self._opened: Session | None = None
        self._explorer_state: State | None = None

    async def open(self, made: Made) -> None:
        """Make buffer and synchronizer; the trainer is asked for every push."""
        load_plugins(made.plugins)
        trainer = Peer(made.trainer)

        async def push(version: int) -> dict[str, float]:
            return await trainer.control("push", version)

        elsewhere = Elsewhere(push=push)
        session = Session(
            made.plan, made.model_path, Silent(), self._device, True, elsewhere=elsewhere
        )
        self._opened = session.__enter__()
        self._supply = session.supply  # made now: what it cannot be is told before any step
        if session.resumed is not None:
            self._explorer_state = session.resumed.run_state["explorer"]

    async def begin(self, state: State) -> None:
        """The explorer begins where `state` says."""
        self._explorer_state = state

    async def put(self, data: bytes, state: State) -> dict[str, Any]:
        """Experiences of one explore step, and where the explorer goes on after it."""
        await self._session.buffer.put(decode(data))
        self._explorer_state = state
        return self._status()

    async def take(self, version: int) -> tuple[bytes, dict[str, float]]:
        """The trainer's next batch."""
        experiences, metrics = await self._supply.take(version)
        return encode(experiences), metrics

    async def commit(self) -> None:
        """See Supply."""
        await self._supply.commit()

    async def close(self) -> None:
        """See Buffer."""
        await self._session.buffer.close()

    async def fail(self, cause: str) -> None:
        """See Buffer."""
        await self._session.buffer.fail(RuntimeError(cause))

    async def pull(self, step: int) -> dict[str, Any]:
        """See ExplorerSync."""
        await self._session.synchronizer.pull(step)
        return self._status()

    async def trained(self, step: int) -> dict[str, float]:
        """See TrainerSync."""
        return await self._session.synchronizer.trained(step)

    async def stopped(self, step: int) -> None:
        """See TrainerSync."""
        await self._session.synchronizer.stopped(step)

    async def final_push(self) -> None:
        """See Synchronizer."""
        await self._session.synchronizer.final_push()

    async def snapshot(self) -> State:
        """See Checkpointer."""
        return await self._session.snapshot() | {"explorer": self._explorer_state}

    async def stop(self) -> None:
        """Close the files."""
        if self._opened is not None:
            self._opened.__exit__(None, None, None)
        self._device.close()

    @property
    def _session(self) -> Session:
        assert self._opened is not None
        return self._opened

    def _status(self) -> dict[str, Any]:
        sync = self._session.synchronizer
        return {"finished": sync.finished, "metrics": sync.metrics()}


class Silent:
    """A console that nobody sees."""

    def note(self, text: str) -> None:
        """See Console."""

    def step(self, part: str, step: int, metrics: Mapping[str, float]) -> None:
        """See Console."""

    def rollout(self, experience: Experience) -> None:
        """See Console."""

"""Proxies: what a part sees of the coordinator: buffer, supply, synchronizer by their protocols.

Experiences travel as the bytes of `serialize`; everything else is numbers and text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayTaskError

from trireme.algorithms.sample import Sample
from trireme.buffer.buffer import Demand
from trireme.config import Plan
from trireme.experience import Experience
from trireme.serialize import decode, encode
from trireme.sync.synchronizer import is_due

State = dict[str, Any]


class PutSide:
    """The explorer's side of the Buffer: each put says where the explorer goes on after it."""

    def __init__(
        self, coordinator: Peer, sync: ExplorerSide, explorer_state: Callable[[], State]
    ) -> None:
        self._coordinator = coordinator
        self._sync = sync
        self._explorer_state = explorer_state
        self.demand = Demand()

    async def put(self, experiences: Sequence[Experience]) -> None:
        """See Buffer."""
        data = encode(experiences)
        self._sync.hear(await self._coordinator.data("put", data, self._explorer_state()))

    async def fail(self, error: BaseException) -> None:
        """See Buffer."""
        await self._coordinator.control("fail", f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """See Buffer."""
        await self._coordinator.control("close")

    async def take(self, n: int) -> list[Experience]:
        """See Buffer; an explorer takes nothing."""
        raise NotImplementedError("the explorer's side of a buffer has no take")

    async def take_step(self) -> list[Experience]:
        """See Buffer; an explorer takes nothing."""
        raise NotImplementedError("the explorer's side of a buffer has no take_step")

    def __len__(self) -> int:
        return 0

    def metrics(self) -> dict[str, float]:
        """See Buffer; the trainer's side reports them."""
        return {}

    def commit(self) -> None:
        """See Buffer; nothing is kept here."""

    def state(self) -> State:
        """See Buffer; nothing is kept here."""
        return {}

    def load_state(self, state: State) -> None:
        """See Buffer; nothing is kept here."""


class TakeSide:
    """Supply over the coordinator's buffer."""

    lets_go = False
    """The coordinator would go on taking."""

    def __init__(self, coordinator: Peer) -> None:
        self._coordinator = coordinator

    async def take(self, version: int) -> Sample:
        """See Supply."""
        data, metrics = await self._coordinator.data("take", version)
        return decode(data), metrics

    async def commit(self) -> None:
        """See Supply."""
        await self._coordinator.control("commit")

    async def close(self) -> None:
        """See Supply."""
        await self._coordinator.control("close")


class ExplorerSide:
    """ExplorerSync: as far as the coordinator has said."""

    def __init__(self, coordinator: Peer, plan: Plan) -> None:
        self._coordinator = coordinator
        self._plan = plan
        self._metrics = {"sync/version": 0.0, "sync/skipped": 0.0, "time/sync_wait": 0.0}
        self.finished = False

    def begin_at(self, version: int) -> None:
        """A resumed run goes on from `version`."""
        self._metrics["sync/version"] = version

    def due(self, step: int) -> bool:
        """See ExplorerSync."""
        plan = self._plan
        meets = plan.sync_style in ("fixed", "explorer_driven")
        return meets and is_due(step, plan.sync_interval, plan.sync_offset)

    async def pull(self, step: int) -> None:
        """See ExplorerSync."""
        self.hear(await self._coordinator.control("pull", step))

    def metrics(self) -> dict[str, float]:
        """See ExplorerSync."""
        return dict(self._metrics)

    def hear(self, status: Mapping[str, Any]) -> None:
        """What an answer of the coordinator tells by the way."""
        self.finished = status["finished"]
        self._metrics |= status["metrics"]


class TrainerSide:
    """TrainerSync; this process pushes when the coordinator asks for it, and so knows versions."""

    def __init__(self, coordinator: Peer, *, version: int = 0, step: int = 0) -> None:
        self._coordinator = coordinator
        self.version = version
        self.trained_step = self.pushed_step = step

    async def trained(self, step: int) -> dict[str, float]:
        """See TrainerSync."""
        self.trained_step = step
        return await self._coordinator.control("trained", step)

    async def stopped(self, step: int) -> None:
        """See TrainerSync."""
        self.trained_step = step
        await self._coordinator.control("stopped", step)


class Relay:
    """A console in another process. What is said arrives in order; `flush` says that it has."""

    def __init__(self, coordinator: Peer) -> None:
        self._coordinator = coordinator
        self._sent: deque[Any] = deque()

    def note(self, text: str) -> None:
        """See Console."""
        self._send("note", text)

    def step(self, part: str, step: int, metrics: Mapping[str, float]) -> None:
        """See Console."""
        self._send("step", part, step, {key: float(value) for key, value in metrics.items()})

    def rollout(self, experience: Experience) -> None:
        """See Console."""
        self._send("rollout", encode([experience]))

    async def flush(self) -> None:
        """Until all has arrived."""
        while self._sent:
            await answer(self._sent.popleft())

    def _send(self, *event: Any) -> None:
        self._sent.append(self._coordinator.handle.control.remote("report", event))


class Peer:
    """A part in another process: its calls raise what they raised there."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def control(self, name: str, *args: Any) -> Any:
        """See Host."""
        return await answer(self.handle.control.remote(name, *args))

    async def data(self, name: str, *args: Any) -> Any:
        """See Host."""
        return await answer(self.handle.data.remote(name, *args))

    async def ping(self) -> dict[str, Any]:
        """See Host."""
        return await answer(self.handle.ping.remote())


async def answer(reference: Any) -> Any:
    """What a call came to."""
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, RayTaskError):
            raise cause from error
        raise

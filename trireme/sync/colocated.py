"""Colocated: weights from the ranks of a trainer to engines that share their devices, in pairs.

Each rank gathers the weights a bucket at a time and lends the bucket to the engine on its own
device, over a weight group of these two (`ipc`). The order of a push, which keeps both sides within
one device's memory:

- the trainer's turn: the engines rest; the ranks score the probe, then free what they keep;
- the engines wake for their weights alone, and copy bucket after bucket;
- they commit the version; the ranks free the last bucket and all that they kept for it;
- with the next call the engines wake whole, and their keys and values have room again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from torch import Tensor

from trireme.aio import first_failure
from trireme.engines.device import Device
from trireme.engines.remote import RemoteEngine
from trireme.engines.weight_group import Meeting
from trireme.sync.probe import Probe, WeightSource
from trireme.sync.push import Sent

HOST = "127.0.0.1"
"""Of a pair's meeting point: it is one machine's."""

Noted = Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]


class Pairs(Protocol):
    """The trainer's ranks, as far as a push knows them: see `EnginePairs`."""

    def meet(self) -> list[int]:
        """Open a meeting point on every rank; their ports, by rank."""
        ...

    def make_room(self) -> None:
        """Free what engines need more, on every rank."""
        ...

    def send(self, dtype: str, note: Noted) -> None:
        """Lend the weights, cast to `dtype`, on every rank; `note` sees them pass on this one."""
        ...

    def give_up(self) -> None:
        """End a `send` that is under way in another thread."""
        ...


class ColocatedSync:
    """The first rank's side."""

    def __init__(
        self,
        backend: WeightSource,
        pairs: Pairs,
        engine: RemoteEngine,
        device: Device,
        *,
        dtype: str,
        probe: Probe,
    ) -> None:
        """`engine`: a server for each rank, in their order."""
        self._backend = backend
        self._pairs = pairs
        self._engine = engine
        self._device = device
        self._dtype = dtype
        self._probe = probe
        self._met: dict[str, str] = {}
        """The engines' instances that have met their ranks."""

    async def push(self, version: int) -> dict[str, float]:
        """Engines at `version`, and proof that it is the trainer's. Raises WrongWeights."""
        engine, begun = self._engine, asyncio.Event()
        await engine.servers.connect()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)

        async def receive() -> None:
            await begun.wait()
            await engine.call_all("/engine/group/receive", asleep=True)

        async with self._device.turn():
            if self._met != engine.servers.instances:
                await self._meet()
            send = self._device.amid_turn(self._send, tell)
            try:
                (sent, expected), _ = await first_failure(send, receive())
            except BaseException:
                self._pairs.give_up()
                self._met = {}  # they may be at different buckets: they meet anew
                raise
            version_of = engine.as_version(version)
            await engine.call_all("/engine/group/commit", version_of, asleep=True)
        engine.now_at(version)
        metrics = await self._probe.prove(engine, sent.marks, expected, version=version)
        return metrics | {"sync/pushed_bytes": float(sent.size)}

    async def _meet(self) -> None:
        ports = await self._device.amid_turn(self._pairs.meet)
        if len(ports) != len(self._engine.urls):
            raise RuntimeError(
                f"{len(ports)} trainer ranks and {len(self._engine.urls)} engines are no pairs"
            )
        place = {"host": HOST, "world_size": 2, "rank": 1, "backend": "ipc"}
        bodies = [vars(Meeting(**place, port=port)) for port in ports]
        await self._engine.call_all("/engine/group/join", *bodies, asleep=True)
        self._met = dict(self._engine.servers.instances)

    def _send(self, tell: Callable[[], object]) -> tuple[Sent, list[float]]:
        """Lend the weights; what was sent, and the probe's scores by it."""
        sent = Sent(self._dtype, dict(self._backend.unmoved(self._dtype)))
        expected = self._backend.score([self._probe.ids])[0]
        self._pairs.make_room()
        tell()  # from here on engines wait for the first bucket
        try:
            self._pairs.send(self._dtype, sent.noted)
        finally:
            self._pairs.make_room()
        return sent, expected

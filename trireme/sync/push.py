"""Push: weights from a trainer to its engines, in this process, by HTTP or over process groups.

Within one process they are shared, or copied once, in the engine's dtype. By HTTP they go in
buckets of that dtype too, while the trainer rests: no copy of all of them is made. Over a group:

- The group is made at the first push, and anew when an engine was started again. Both sides wait
  for each other with a time-out that names who did not come.
- A push: all engines pause and receive; when all have everything they commit the version.
  Then all continue; where one fails none does, and the run ends.
- Then the proof: fingerprints of every engine, and log-probabilities of the probe.

To engines that share the devices of the trainer's ranks each rank gathers the weights a bucket at a
time and lends the bucket to the engine on its own device, over a weight group of these two (`ipc`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from trireme.aio import first_failure
from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.engines.remote import RemoteEngine
from trireme.engines.weight_group import (
    BUCKET_BYTES,
    TIMEOUT_S,
    Meeting,
    WeightGroup,
    buckets,
    dtype_named,
    fingerprint,
)
from trireme.sync.probe import Probe, WeightSource


class WeightPush(Protocol):
    """A way of weights to an engine, by its name in PUSHES; made by `of`."""

    @classmethod
    def of(cls, parts: PushParts) -> WeightPush:
        """The push between these two sides."""
        ...

    async def push(self, version: int) -> dict[str, float]:
        """Engines at `version`, and proof that it is the trainer's. Raises WrongWeights."""
        ...

    async def give(self, version: int) -> None:
        """Engines at `version`, without a proof."""
        ...


@dataclass(frozen=True)
class PushParts:
    """The parts of a trainer and its engine that a push may need."""

    source: WeightSource
    engine: Any
    """An Engine that names the push in its `pushes`."""
    device: Device
    dtype: str
    """The engine's."""
    probe: Probe
    shared: bool = False
    """Engine and trainer read the same tensors."""
    lock_step: bool = False
    """Nothing is trained until a push has ended."""
    host: str = "127.0.0.1"
    """The address of this machine as the engines see it."""
    on_gpu: bool = False
    pairs: Pairs | None = None
    """The trainer's ranks, where an engine shares the device of each."""


@dataclass(eq=False)
class MemorySync:
    """Pushes the trainer's tensors; where they are shared only the version changes hands."""

    backend: WeightSource
    engine: Engine
    device: Device
    _: KW_ONLY
    dtype: str
    """The engine's."""
    probe: Probe
    shared: bool
    """Engine and trainer read the same tensors."""
    lock_step: bool = False
    """Nothing is trained until a push has ended, so that the engine copies from the tensors
    themselves."""

    @classmethod
    def of(cls, parts: PushParts) -> MemorySync:
        """Make the push from its parts."""
        return cls(
            parts.source,
            parts.engine,
            parts.device,
            dtype=parts.dtype,
            probe=parts.probe,
            shared=parts.shared,
            lock_step=parts.lock_step,
        )

    async def give(self, version: int) -> None:
        """Bring the engine to `version`, without a proof."""
        weights = None if self.shared else await self.device.run(self.backend.weights)
        await self.engine.update_weights(weights, version)

    async def push(self, version: int) -> dict[str, float]:
        """Engine at `version`, and proof that it is the trainer's. Raises WrongWeights.

        Weights and expected scores are read in one go on the device: no train step comes between.
        """
        source, marks, expected = await self.device.run(self._snapshot)
        await self.engine.update_weights(source, version)
        metrics = await self.probe.prove(self.engine, marks, expected, version=version)
        size = sum(tensor.nbytes for tensor in (source or {}).values())
        return metrics | {"sync/pushed_bytes": float(size)}

    def _snapshot(self) -> tuple[dict[str, Tensor] | None, dict[str, float], list[float]]:
        """Weights, their fingerprints in the engine's dtype, and the probe's scores."""
        expected = self.probe.expected(self.backend)
        weights, marks = self.backend.weights(), self.backend.unmoved(self.dtype)
        if self.shared or self.lock_step:
            marks = marks | fingerprint(weights, self.dtype)
            return None if self.shared else weights, marks, expected
        own = dtype_named(self.dtype)
        copies = {}
        for name, tensor in weights.items():
            dtype = own if tensor.is_floating_point() else tensor.dtype
            copies[name] = tensor.detach().to(dtype, copy=True)
        return copies, marks | fingerprint(copies, self.dtype), expected


@dataclass(eq=False)
class HttpSync:
    """Pushes to rollout servers, a bucket at a time."""

    backend: WeightSource
    engine: RemoteEngine
    device: Device
    _: KW_ONLY
    dtype: str
    """The engine's: what is sent."""
    probe: Probe

    @classmethod
    def of(cls, parts: PushParts) -> HttpSync:
        """Make the push from its parts."""
        return cls(parts.source, parts.engine, parts.device, dtype=parts.dtype, probe=parts.probe)

    async def push(self, version: int) -> dict[str, float]:
        """Engines at `version`, and proof that it is the trainer's. Raises WrongWeights."""
        sent, expected = await self._deliver(version, lambda: self.probe.expected(self.backend))
        metrics = await self.probe.prove(self.engine, sent.marks, expected, version=version)
        return metrics | {"sync/pushed_bytes": float(sent.size)}

    async def give(self, version: int) -> None:
        """Engines at `version`, without a proof."""
        await self._deliver(version, list)

    async def _deliver(
        self, version: int, score: Callable[[], list[float]]
    ) -> tuple[Sent, list[float]]:
        """Send and commit the weights; returns what was sent, and their scores by `score`."""
        await self.engine.servers.connect()
        loop, given_up = asyncio.get_running_loop(), threading.Event()

        def wait_for(sending: Coroutine[Any, Any, Any]) -> None:
            future = asyncio.run_coroutine_threadsafe(sending, loop)
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            while not done.wait(0.2):
                if given_up.is_set():  # the loop may end, and then the future never does
                    raise RuntimeError("the push was given up")
            future.result()

        def send() -> tuple[Sent, list[float]]:
            scores = score()
            sent = Sent(self.dtype, dict(self.backend.unmoved(self.dtype)))
            with closing(self.backend.each_weight(self.dtype)) as weights:
                for bucket in buckets(sent.noted(weights), self.engine.bucket_bytes):
                    wait_for(self.engine.send_weights(bucket))
            return sent, scores

        try:
            found = await self.device.run(send)
        finally:
            given_up.set()
        await self.engine.commit_weights(version)
        return found


@dataclass
class Sent:
    """Counts weights, and notes their fingerprints, while they are sent."""

    dtype: str
    marks: dict[str, float]
    """Fingerprints, those of weights that engines have already among them."""
    size: int = 0
    """The bytes sent."""

    def noted(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same weights, counted and fingerprinted."""
        for name, tensor in weights:
            self.marks |= fingerprint({name: tensor}, self.dtype)
            self.size += tensor.nbytes
            yield name, tensor


@dataclass(eq=False)
class GroupSync:
    """The trainer's side."""

    backend: WeightSource
    engine: RemoteEngine
    device: Device
    _: KW_ONLY
    dtype: str
    """The engine's: what is sent."""
    probe: Probe
    transport: str = "gloo"
    """gloo, or nccl between GPUs."""
    host: str = "127.0.0.1"
    """The address of this machine as the engines see it."""
    timeout: float = TIMEOUT_S
    bucket_bytes: int = BUCKET_BYTES
    _group: WeightGroup | None = field(default=None, init=False)
    _met: dict[str, str] = field(default_factory=dict, init=False)
    """The engines' instances that are in it."""

    @classmethod
    def of(cls, parts: PushParts) -> GroupSync:
        """Make the push from its parts; the group is over NCCL between GPUs."""
        return cls(
            parts.source,
            parts.engine,
            parts.device,
            dtype=parts.dtype,
            probe=parts.probe,
            transport="nccl" if parts.on_gpu else "gloo",
            host=parts.host,
        )

    async def give(self, version: int) -> None:
        """Push, and drop the proof, which nobody asks for."""
        await self.push(version)

    async def push(self, version: int) -> dict[str, float]:
        """Engines at `version`, and proof that it is the trainer's. Raises WrongWeights."""
        if self._group is None or self._met != self.engine.servers.instances:
            self._group = await self._meet()
        group = self._group
        begun = asyncio.Event()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)

        async def receive() -> None:
            await begun.wait()  # a train step may come first, for longer than engines wait
            await self.engine.call_all("/engine/group/receive")

        send = self.device.run(self._send, group, tell)
        try:
            (marks, expected, size), _ = await first_failure(send, receive())
        except BaseException:
            self._group = None  # its members may be at different buckets: they meet anew
            raise
        await self.engine.call_all("/engine/group/commit", self.engine.as_version(version))
        self.engine.now_at(version)
        metrics = await self.probe.prove(self.engine, marks, expected, version=version)
        return metrics | {"sync/pushed_bytes": float(size)}

    async def _meet(self) -> WeightGroup:
        self._group = None
        sizes = await self.engine.get_all("/engine/group/size")
        firsts, names = [], {}
        rank = 1
        for url, workers in zip(self.engine.urls, (s["workers"] for s in sizes), strict=True):
            firsts.append(rank)
            names |= {rank + w: f"worker {w} of {url}" for w in range(workers)}
            rank += workers
        common = {"host": self.host, "world_size": rank, "backend": self.transport}
        common["timeout"] = self.timeout
        group = WeightGroup(Meeting(port=0, rank=0, **common))
        bodies = [common | {"port": group.port, "rank": first} for first in firsts]
        await first_failure(
            asyncio.to_thread(group.connect, names),
            self.engine.call_all("/engine/group/join", *bodies),
        )
        self._met = dict(self.engine.servers.instances)
        return group

    def _send(
        self, group: WeightGroup, tell: Callable[[], object]
    ) -> tuple[dict[str, float], list[float], int]:
        """Broadcast the weights; their fingerprints, the probe's scores by them, and bytes."""
        sent = Sent(self.dtype, dict(self.backend.unmoved(self.dtype)))
        tell()  # from here on engines wait for the first bucket
        expected = self.probe.expected(self.backend)
        # closed at once also where sending fails: other trainer ranks go through them meanwhile
        with closing(self.backend.each_weight(self.dtype)) as weights:
            group.send(sent.noted(weights), bucket_bytes=self.bucket_bytes)
        return sent.marks, expected, sent.size


HOST = "127.0.0.1"
"""The host of a pair's meeting point: both are on one machine."""

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


@dataclass(eq=False)
class ColocatedSync:
    """Pushes from each of the trainer's ranks to the engine on its own device; the first rank's
    side.

    The order of a push keeps both sides within one device's memory:

    - the trainer's turn: the engines rest; the ranks score the probe, then free their caches;
    - the engines wake for their weights alone, and copy bucket after bucket;
    - they commit the version; the ranks free the last bucket and all memory that it needed;
    - with the next call the engines wake whole, and their keys and values have room again.
    """

    backend: WeightSource
    pairs: Pairs
    engine: RemoteEngine
    """A server for each rank, in their order."""
    device: Device
    _: KW_ONLY
    dtype: str
    probe: Probe
    _met: dict[str, str] = field(default_factory=dict, init=False)
    """The engines' instances that have met their ranks."""

    @classmethod
    def of(cls, parts: PushParts) -> ColocatedSync:
        """Make the push from its parts, of which `pairs` must be given."""
        assert parts.pairs is not None, "ranks and engines share no device"
        return cls(
            parts.source,
            parts.pairs,
            parts.engine,
            parts.device,
            dtype=parts.dtype,
            probe=parts.probe,
        )

    async def give(self, version: int) -> None:
        """Push, and drop the proof, which nobody asks for."""
        await self.push(version)

    async def push(self, version: int) -> dict[str, float]:
        """Engines at `version`, and proof that it is the trainer's. Raises WrongWeights."""
        engine, begun = self.engine, asyncio.Event()
        await engine.servers.connect()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)

        async def receive() -> None:
            await begun.wait()
            await engine.call_all("/engine/group/receive", asleep=True)

        async with self.device.turn():
            if self._met != engine.servers.instances:
                await self._meet()
            send = self.device.amid_turn(self._send, tell)
            try:
                (sent, expected), _ = await first_failure(send, receive())
            except BaseException:
                self.pairs.give_up()
                self._met = {}  # they may be at different buckets: they meet anew
                raise
            version_of = engine.as_version(version)
            await engine.call_all("/engine/group/commit", version_of, asleep=True)
        engine.now_at(version)
        metrics = await self.probe.prove(engine, sent.marks, expected, version=version)
        return metrics | {"sync/pushed_bytes": float(sent.size)}

    async def _meet(self) -> None:
        ports = await self.device.amid_turn(self.pairs.meet)
        if len(ports) != len(self.engine.urls):
            raise RuntimeError(
                f"{len(ports)} trainer ranks and {len(self.engine.urls)} engines are no pairs"
            )
        place = {"host": HOST, "world_size": 2, "rank": 1, "backend": "ipc"}
        bodies = [vars(Meeting(**place, port=port)) for port in ports]
        await self.engine.call_all("/engine/group/join", *bodies, asleep=True)
        self._met = dict(self.engine.servers.instances)

    def _send(self, tell: Callable[[], object]) -> tuple[Sent, list[float]]:
        """Lend the weights; what was sent, and the probe's scores by it."""
        sent = Sent(self.dtype, dict(self.backend.unmoved(self.dtype)))
        expected = self.probe.expected(self.backend)
        self.pairs.make_room()
        tell()  # from here on engines wait for the first bucket
        try:
            self.pairs.send(self.dtype, sent.noted)
        finally:
            self.pairs.make_room()
        return sent, expected

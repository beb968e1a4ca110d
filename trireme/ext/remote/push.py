"""Push: sends weights from a trainer to engines of other processes, by HTTP or over process groups.

By HTTP they are sent in buckets of the engine's dtype, while the trainer pauses: they are never
copied all at once. Over a group:

- The group is made at the first push, and again when an engine was restarted. Both sides wait for
  each other with a time-out that names the missing members.
- A push: all engines pause and receive; when all have everything they commit the version. Then all
  continue; if one fails none does, and the run ends.
- Then the verification: fingerprints of every engine, and log-probabilities of the probe.

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
from typing import Any

from torch import Tensor

from trireme.aio import first_failure
from trireme.engines.device import Device
from trireme.engines.weights import fingerprint
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.weight_group import BUCKET_BYTES, TIMEOUT_S, Meeting, WeightGroup, buckets
from trireme.sync.probe import Probe, WeightSource
from trireme.sync.push import Pairs, PushParts


@dataclass(eq=False)
class HttpSync:
    """Pushes to rollout servers, a bucket at a time."""

    backend: WeightSource
    engine: RemoteEngine
    device: Device
    _: KW_ONLY
    dtype: str
    """The engine's dtype, in which weights are sent."""
    probe: Probe

    @classmethod
    def of(cls, parts: PushParts) -> HttpSync:
        """Make the push from its parts."""
        return cls(parts.source, parts.engine, parts.device, dtype=parts.dtype, probe=parts.probe)

    async def push(self, version: int) -> dict[str, float]:
        """Bring the engines to `version`, and verify the weights. Raises WrongWeights."""
        sent, expected = await self._deliver(version, lambda: self.probe.expected(self.backend))
        metrics = await self.probe.prove(self.engine, sent.marks, expected, version=version)
        return metrics | {"sync/pushed_bytes": float(sent.size)}

    async def give(self, version: int) -> None:
        """Bring the engines to `version`, without verification."""
        await self._deliver(version, list)

    async def _deliver(
        self, version: int, score: Callable[[], list[list[float]]]
    ) -> tuple[Sent, list[list[float]]]:
        """Send and commit the weights; returns a count of them, and their scores by `score`."""
        await self.engine.servers.connect()
        loop, given_up = asyncio.get_running_loop(), threading.Event()

        def wait_for(sending: Coroutine[Any, Any, Any]) -> None:
            future = asyncio.run_coroutine_threadsafe(sending, loop)
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            while not done.wait(0.2):
                if given_up.is_set():  # the loop may end, and then the future never completes
                    raise RuntimeError("the push was given up")
            future.result()

        def send() -> tuple[Sent, list[list[float]]]:
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
    """Counts weights, and records their fingerprints, while they are sent."""

    dtype: str
    marks: dict[str, float]
    """The fingerprints, including those of weights that engines already have."""
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
    """The trainer's side of a process group."""

    backend: WeightSource
    engine: RemoteEngine
    device: Device
    _: KW_ONLY
    dtype: str
    """The engine's dtype, in which weights are sent."""
    probe: Probe
    transport: str = "gloo"
    """gloo, or nccl between GPUs."""
    host: str = "127.0.0.1"
    """The address of this machine as the engines see it."""
    timeout: float = TIMEOUT_S
    bucket_bytes: int = BUCKET_BYTES
    _group: WeightGroup | None = field(default=None, init=False)
    _met: dict[str, str] = field(default_factory=dict, init=False)
    """The engines' instances in the group."""

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
        """Push, and drop the verification's metrics."""
        await self.push(version)

    async def push(self, version: int) -> dict[str, float]:
        """Bring the engines to `version`, and verify the weights. Raises WrongWeights."""
        if self._group is None or self._met != self.engine.servers.instances:
            self._group = await self._meet()
        group = self._group
        begun = asyncio.Event()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)

        async def receive() -> None:
            await begun.wait()  # a train step may run first, for longer than engines wait
            await self.engine.call_all("/engine/group/receive")

        send = self.device.run(self._send, group, tell)
        try:
            (marks, expected, size), _ = await first_failure(send, receive())
        except BaseException:
            self._group = None  # its members may be at different buckets: make a new one
            raise
        await self.engine.call_all("/engine/group/commit", self.engine.as_version(version))
        self.engine.now_at(version, self._met)
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
    ) -> tuple[dict[str, float], list[list[float]], int]:
        """Broadcast the weights; returns their fingerprints, the probe's scores by them,
        and bytes.
        """
        sent = Sent(self.dtype, dict(self.backend.unmoved(self.dtype)))
        tell()  # from now on engines wait for the first bucket
        expected = self.probe.expected(self.backend)
        # closed at once, also if sending fails: other trainer ranks go through the weights
        # meanwhile
        with closing(self.backend.each_weight(self.dtype)) as weights:
            group.send(sent.noted(weights), bucket_bytes=self.bucket_bytes)
        return sent.marks, expected, sent.size


HOST = "127.0.0.1"
"""The host of a pair's meeting point: both are on one machine."""


@dataclass(eq=False)
class ColocatedSync:
    """Pushes from each of the trainer's ranks to the engine on its own device; the first rank's
    side.

    The order of a push keeps both sides within one device's memory:

    - the trainer's turn: the engines pause; the ranks score the probe, then free their caches;
    - the engines wake with only their weights, and copy bucket after bucket;
    - they commit the version; the ranks free the last bucket and all memory that it needed;
    - with the next call the engines wake fully, and their keys and values have room again.
    """

    backend: WeightSource
    pairs: Pairs
    engine: RemoteEngine
    """One server per rank, in order."""
    device: Device
    _: KW_ONLY
    dtype: str
    probe: Probe
    _met: dict[str, str] = field(default_factory=dict, init=False)
    """The engines' instances that are connected to their ranks."""

    @classmethod
    def of(cls, parts: PushParts) -> ColocatedSync:
        """Make the push from its parts; `pairs` is required."""
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
        """Push, and drop the verification's metrics."""
        await self.push(version)

    async def push(self, version: int) -> dict[str, float]:
        """Bring the engines to `version`, and verify the weights. Raises WrongWeights."""
        engine, begun = self.engine, asyncio.Event()
        await engine.servers.connect()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)

        async def receive() -> None:
            await begun.wait()
            await engine.call_all("/engine/group/receive", asleep=True)

        async with self.device.turn(weights_follow=True):
            if self._met != engine.servers.instances:
                await self._meet()
            send = self.device.amid_turn(self._send, tell)
            try:
                (sent, expected), _ = await first_failure(send, receive())
            except BaseException:
                self.pairs.give_up()
                self._met = {}  # they may be at different buckets: connect again
                raise
            version_of = engine.as_version(version)
            await engine.call_all("/engine/group/commit", version_of, asleep=True)
            if self.device.colocation is not None:
                self.device.colocation.arrived()
        engine.now_at(version, self._met)
        metrics = await self.probe.prove(engine, sent.marks, expected, version=version)
        return metrics | {"sync/pushed_bytes": float(sent.size)}

    async def _meet(self) -> None:
        ports = await self.device.amid_turn(self.pairs.meet)
        if len(ports) != len(self.engine.urls):
            raise RuntimeError(
                f"{len(ports)} trainer ranks and {len(self.engine.urls)} engines cannot be paired"
            )
        place = {"host": HOST, "world_size": 2, "rank": 1, "backend": "ipc"}
        bodies = [vars(Meeting(**place, port=port)) for port in ports]
        await self.engine.call_all("/engine/group/join", *bodies, asleep=True)
        self._met = dict(self.engine.servers.instances)

    def _send(self, tell: Callable[[], object]) -> tuple[Sent, list[list[float]]]:
        """Lend the weights; returns a count of them, and the probe's scores."""
        sent = Sent(self.dtype, dict(self.backend.unmoved(self.dtype)))
        expected = self.probe.expected(self.backend)
        self.pairs.make_room()
        tell()  # from now on engines wait for the first bucket
        try:
            self.pairs.send(self.dtype, sent.noted)
        finally:
            self.pairs.make_room()
        return sent, expected

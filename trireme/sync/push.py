"""Push: weights from a trainer to its engines, in this process or over a process group.

Within one process they are shared, or copied once. Over a group:

- The group is made at the first push, and anew when an engine was started again. Both sides wait
  for each other with a time-out that names who did not come.
- A push: all engines pause and receive; when all have everything they commit the version and go on.
  Where one fails none goes on, and the run ends.
- Then the proof: fingerprints of every engine, and log-probabilities of the probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from trireme.aio import first_failure
from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.engines.remote import RemoteEngine
from trireme.engines.weight_group import BUCKET_BYTES, TIMEOUT_S, Meeting, WeightGroup, fingerprint
from trireme.sync.probe import WeightSource, probe_ids, prove


class MemorySync:
    """Pushes the trainer's tensors; where they are shared only the version changes hands."""

    def __init__(
        self,
        backend: WeightSource,
        engine: Engine,
        device: Device,
        *,
        shared: bool,
        dtype: str,
        vocabulary: int,
    ) -> None:
        """`shared`: engine and trainer read the same tensors."""
        self._backend = backend
        self._engine = engine
        self._device = device
        self._shared = shared
        self._dtype = dtype
        self._probe = probe_ids(vocabulary)

    async def push(self, version: int) -> dict[str, float]:
        """Engine at `version`, and proof that it is the trainer's. Raises WrongWeights.

        Weights and expected scores are read in one go on the device: no train step comes between.
        """
        source, marks, expected = await self._device.run(self._snapshot)
        await self._engine.update_weights(source, version)
        return await prove(
            self._engine, self._probe, marks, expected, version=version, dtype=self._dtype
        )

    def _snapshot(self) -> tuple[dict[str, Tensor] | None, dict[str, float], list[float]]:
        """Weights, their fingerprints in the engine's dtype, and the probe's scores."""
        expected = self._backend.score([self._probe])[0]
        weights = self._backend.weights()
        if self._shared:
            return None, fingerprint(weights, self._dtype), expected
        copies = {name: tensor.detach().clone() for name, tensor in weights.items()}
        return copies, fingerprint(copies, self._dtype), expected


class GroupSync:
    """The trainer's side."""

    def __init__(
        self,
        backend: WeightSource,
        engine: RemoteEngine,
        device: Device,
        *,
        dtype: str,
        vocabulary: int,
        transport: str = "gloo",
        host: str = "127.0.0.1",
        timeout: float = TIMEOUT_S,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`transport`: gloo, or nccl between GPUs; `host`: this machine as the engines see it."""
        self._backend = backend
        self._engine = engine
        self._device = device
        self._dtype = dtype
        self._transport = transport
        self._host = host
        self._timeout = timeout
        self._bucket_bytes = bucket_bytes
        self._probe = probe_ids(vocabulary)
        self._group: WeightGroup | None = None
        self._met: dict[str, str] = {}
        """The engines' instances that are in it."""

    async def push(self, version: int) -> dict[str, float]:
        """Engines at `version`, and proof that it is the trainer's. Raises WrongWeights."""
        if self._group is None or self._met != self._engine.servers.instances:
            self._group = await self._meet()
        group = self._group
        begun = asyncio.Event()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)

        async def receive() -> None:
            await begun.wait()  # a train step may come first, for longer than engines wait
            await self._engine.call_all("/engine/group/receive")

        send = self._device.run(self._send, group, tell)
        (marks, expected), _ = await first_failure(send, receive())
        await self._engine.call_all("/engine/group/commit", self._engine.as_version(version))
        self._engine.now_at(version)
        return await prove(
            self._engine, self._probe, marks, expected, version=version, dtype=self._dtype
        )

    async def _meet(self) -> WeightGroup:
        """The group, when all have come."""
        self._group = None
        sizes = await self._engine.get_all("/engine/group/size")
        firsts, names = [], {}
        rank = 1
        for url, workers in zip(self._engine.urls, (s["workers"] for s in sizes), strict=True):
            firsts.append(rank)
            names |= {rank + w: f"worker {w} of {url}" for w in range(workers)}
            rank += workers
        common = {"host": self._host, "world_size": rank, "backend": self._transport}
        common["timeout"] = self._timeout
        group = WeightGroup(Meeting(port=0, rank=0, **common))
        bodies = [common | {"port": group.port, "rank": first} for first in firsts]
        await first_failure(
            asyncio.to_thread(group.connect, names),
            self._engine.call_all("/engine/group/join", *bodies),
        )
        self._met = dict(self._engine.servers.instances)
        return group

    def _send(
        self, group: WeightGroup, tell: Callable[[], object]
    ) -> tuple[dict[str, float], list[float]]:
        """Broadcast the weights; their fingerprints, and the probe's scores by them."""
        tell()
        expected = self._backend.score([self._probe])[0]
        marks: dict[str, float] = {}

        def noted(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                marks.update(fingerprint({name: tensor}, self._dtype))
                yield name, tensor

        dtype = getattr(torch, self._dtype)
        # closed at once also where sending fails: other trainer ranks go through them meanwhile
        with closing(self._backend.each_weight()) as weights:
            group.send(noted(weights), dtype=dtype, bucket_bytes=self._bucket_bytes)
        return marks, expected

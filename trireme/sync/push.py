"""Push: sends weights from a trainer to its engine.

Within one process they are shared, or copied once, in the engine's dtype. Pushes to other processes
are an extension's; every push ends with the verification: fingerprints of every engine, and
log-probabilities of the probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from torch import Tensor

from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.engines.weights import dtype_named, fingerprint
from trireme.sync.probe import Probe, WeightSource


class WeightPush(Protocol):
    """A method of sending weights to an engine, by its name in PUSHES; made by `of`."""

    @classmethod
    def of(cls, parts: PushParts) -> WeightPush:
        """Make the push between these two sides."""
        ...

    async def push(self, version: int) -> dict[str, float]:
        """Bring the engines to `version`, and verify the weights. Raises WrongWeights."""
        ...

    async def give(self, version: int) -> None:
        """Bring the engines to `version`, without verification."""
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
    """Whether engine and trainer read the same tensors."""
    lock_step: bool = False
    """Whether nothing is trained until a push has ended."""
    host: str = "127.0.0.1"
    """The address of this machine as the engines see it."""
    on_gpu: bool = False
    pairs: Pairs | None = None
    """The trainer's ranks, if an engine shares the device of each."""


@dataclass(eq=False)
class MemorySync:
    """Pushes the trainer's tensors; if they are shared only the version changes."""

    backend: WeightSource
    engine: Engine
    device: Device
    _: KW_ONLY
    dtype: str
    """The engine's."""
    probe: Probe
    shared: bool
    """Whether engine and trainer read the same tensors."""
    lock_step: bool = False
    """Whether nothing is trained until a push has ended, so that the engine copies from the tensors
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
        """Bring the engine to `version`, without verification."""
        weights = None if self.shared else await self.device.run(self.backend.weights)
        await self.engine.update_weights(weights, version)

    async def push(self, version: int) -> dict[str, float]:
        """Bring the engine to `version`, and verify the weights. Raises WrongWeights.

        Weights and expected scores are read in one call on the device: no train step can occur
        between.
        """
        source, marks, expected = await self.device.run(self._snapshot)
        await self.engine.update_weights(source, version)
        metrics = await self.probe.prove(self.engine, marks, expected, version=version)
        size = sum(tensor.nbytes for tensor in (source or {}).values())
        return metrics | {"sync/pushed_bytes": float(size)}

    def _snapshot(self) -> tuple[dict[str, Tensor] | None, dict[str, float], list[list[float]]]:
        """Return the weights, their fingerprints in the engine's dtype, and the probe's scores."""
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


Noted = Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]


class Pairs(Protocol):
    """The trainer's ranks as a push sees them: see `EnginePairs`."""

    def meet(self) -> list[int]:
        """Open a meeting point on every rank; returns their ports, by rank."""
        ...

    def make_room(self) -> None:
        """Free memory that engines need, on every rank."""
        ...

    def send(self, dtype: str, note: Noted) -> None:
        """Lend the weights, cast to `dtype`, on every rank; `note` observes them on this one."""
        ...

    def give_up(self) -> None:
        """End a `send` that is running in another thread."""
        ...

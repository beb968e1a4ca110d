"""Memory: weights from trainer to engine within one process: shared, or one copy."""

from __future__ import annotations

from torch import Tensor

from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.engines.weight_group import fingerprint
from trireme.sync.probe import WeightSource, compare, compare_weights, probe_ids


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
        compare_weights(await self._engine.fingerprint(), marks, version=version)
        [scored] = await self._engine.logprobs([self._probe])
        return compare(scored, expected, version=version, dtype=self._dtype)

    def _snapshot(self) -> tuple[dict[str, Tensor] | None, dict[str, float], list[float]]:
        """Weights, their fingerprints in the engine's dtype, and the probe's scores."""
        expected = self._backend.score([self._probe])[0]
        weights = self._backend.weights()
        if self._shared:
            return None, fingerprint(weights, self._dtype), expected
        copies = {name: tensor.detach().clone() for name, tensor in weights.items()}
        return copies, fingerprint(copies, self._dtype), expected

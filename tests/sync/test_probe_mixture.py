"""The probe of a mixture whose routers choose between experts that are equal to within rounding:
engine and trainer choose different ones, and a wrong layer is still found at the first push.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.sync.test_probe_half import realistic, swapped
from tests.tiny import make_tokenizer
from tests.trainer.samples import backend_of
from trireme.engines.device import Device
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings, load_weights
from trireme.engines.weights import fingerprint
from trireme.sync.probe import Gap, Probe, WrongWeights

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def tied(weights: Mapping[str, Tensor], by: float) -> dict[str, Tensor]:
    """The first router with two columns that are equal but for `by`, as rounding makes them."""
    name = "model.layers.0.mlp.gate.weight"
    router = weights[name].clone()
    router[1] = router[0] * (1 + by)
    return {**weights, name: router}


class Same:
    """An engine that reports the fingerprints that it should have, as one does that uses the right
    tensors in another way.
    """

    def __init__(self, engine: TorchEngine, marks: Mapping[str, float]) -> None:
        self.traits, self.logprobs, self.marks = engine.traits, engine.logprobs, marks

    async def fingerprint(self) -> Mapping[str, float]:
        return self.marks


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_tied_experts_are_no_fault_of_the_first_push_and_a_wrong_layer_is(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    realistic(folder := tmp_path / "model", 480, "qwen3_moe", seed, head_dim=16, **EXPERTS)
    backend = backend_of(folder)
    weights = {name: tensor.detach().clone() for name, tensor in backend.weights().items()}
    load_weights(backend.module, tied(weights, -1e-6))
    marks = fingerprint(backend.weights(), "float32")

    async def main() -> None:
        device = Device(1)
        engine = TorchEngine(
            folder,
            tokenizer=make_tokenizer(),
            device=device,
            settings=TorchSettings(max_model_len=64),
        )

        async def first_push(given: Mapping[str, Tensor]) -> Gap:
            load_weights(engine.module, given)
            probe = Probe(480, "float32", mixture=True)
            expected = probe.expected(backend)
            served: Any = Same(engine, marks)
            [scored] = await engine.logprobs([probe.ids])
            await probe.prove(served, marks, expected, version=1)
            return Gap.of(scored, expected[0])

        try:
            await first_push(tied(weights, -1e-6))  # rounding alone may choose others here
            with caplog.at_level("WARNING"):
                assert (await first_push(tied(weights, 1e-6))).largest > 1e-2
            assert "the same weights and differ by" in caplog.text
            layers = swapped(tied(weights, 1e-6))
            head = {**tied(weights, 1e-6), "lm_head.weight": weights["lm_head.weight"].flip(0)}
            for wrong in (layers, head):
                with pytest.raises(WrongWeights, match="version 1 the engine's log-probabilities"):
                    await first_push(wrong)
        finally:
            await engine.close()
            device.close()

    asyncio.run(main())

"""vLLM with composites: text alone is loaded, and weights come with or without the towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.composites import make_composite
from tests.ext.vllm.host import serving
from tests.ext.vllm.test_engine import PROMPT, run
from tests.tested import COMPOSITES, VLLM, families
from tests.trainer.samples import backend_of
from tests.trainer.test_composites import SIGHT, own_scores
from tests.vllm import needs_vllm
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.push import GroupSync, HttpSync
from trireme.sync.probe import Probe, WrongWeights
from trireme.trainer.backend import Backend
from trireme.trainer.source import PartSource

pytestmark = [needs_vllm, pytest.mark.slow]
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM has kernels for heads of 32 numbers and more on a CPU."""


def learn(backend: Backend, step: float) -> None:
    """Move the weights that are trained."""
    for parameter in backend.module.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1 + step)


@pytest.mark.parametrize("family", families(VLLM, COMPOSITES))
def test_a_push_leaves_the_towers_at_home_and_proves_the_whole(family: str, tmp_path: Path) -> None:
    folder = make_composite(tmp_path / "a", family, **WIDE)
    backend = backend_of(folder)
    source = PartSource(backend, "text")
    whole, text = backend.weights(), source.weights()
    assert {n for n in whole if n not in text} == {
        n for n in whole if any(part in n for part in SIGHT)
    }
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in (text, whole)]

    async def main(engine: RemoteEngine) -> None:
        asked = Sampling(max_tokens=20, n=2, ignore_eos=True)
        for reply in await engine.generate(PROMPT, asked, key=(1, 0, 0)):
            [expected] = own_scores(folder, [[*PROMPT, *reply.ids]], backend.module.dtype)
            assert reply.logprobs == pytest.approx(expected[len(PROMPT) - 1 :].tolist(), abs=1e-4)
        device = Device(1)
        common: dict[str, Any] = {"dtype": "float32", "probe": Probe(90, "float32")}
        ways = [
            GroupSync(source, engine, device, bucket_bytes=4096, **common),
            HttpSync(source, engine, device, **common),
            HttpSync(backend, engine, device, **common),
            GroupSync(source, engine, device, **common),
        ]
        for version, way in enumerate(ways, 1):
            learn(backend, 0.02)
            metrics = await way.push(version)
            assert metrics["sync/probe_diff"] < 1e-4
            assert metrics["sync/pushed_bytes"] == sizes[way.backend is backend]
        for reply in await engine.generate(PROMPT, asked, key=(2, 0, 0)):
            [scored] = backend.score([[*PROMPT, *reply.ids]])
            assert reply.logprobs == pytest.approx(scored[len(PROMPT) :], abs=1e-4)
        tower = min(set(whole) - set(text))
        backend.module.get_parameter(tower).data.add_(0.5)
        other = PartSource(backend, "text")
        with pytest.raises(WrongWeights, match="1 of"):
            await HttpSync(other, engine, device, **common).push(5)
        some = {**text, tower: whole[tower]}
        with pytest.raises(ValueError, match="tensors are missing"):
            await engine.update_weights(some, 6)
        device.close()

    with serving(folder, max_model_len=64) as host:
        run(host, main)

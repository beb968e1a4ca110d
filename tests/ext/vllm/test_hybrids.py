"""vLLM with models whose layers have a state: scores, a push that moves every weight, the probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ext.vllm.host import serving
from tests.ext.vllm.test_engine import PROMPT, run, trained
from tests.hybrids import make_hybrid
from tests.tested import HYBRIDS, VLLM, families
from tests.trainer.test_hybrids import far_of
from tests.vllm import needs_vllm
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.push import GroupSync, HttpSync
from trireme.sync.probe import Probe

pytestmark = [needs_vllm, pytest.mark.slow]
WIDE = {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "conv_dim": 32,
    "block_dim": 32,
}
"""vLLM has kernels for heads of 32 numbers and more on a CPU."""


@pytest.mark.parametrize("family", families(VLLM, HYBRIDS))
def test_samples_are_scored_as_they_are_trained_and_a_push_is_proved(
    family: str, tmp_path: Path
) -> None:
    folder = make_hybrid(tmp_path / "a", family, **WIDE)
    backend = trained(folder, 0.05)

    async def main(engine: RemoteEngine) -> None:
        asked = Sampling(max_tokens=20, n=2, ignore_eos=True)
        assert far_of(folder, PROMPT, await engine.generate(PROMPT, asked, key=(1, 0, 0))) < 1e-4
        device = Device(1)
        common: dict[str, Any] = {"dtype": "float32", "probe": Probe(99, "float32")}
        group = GroupSync(backend, engine, device, bucket_bytes=4096, **common)
        http = HttpSync(trained(folder, 0.1), engine, device, **common)
        assert (await group.push(1))["sync/probe_diff"] < 1e-4
        assert (await http.push(2))["sync/probe_diff"] < 1e-4
        assert (await group.push(3))["sync/probe_diff"] < 1e-4
        for reply in await engine.generate(PROMPT, asked, key=(2, 0, 0)):
            [scored] = backend.score([[*PROMPT, *reply.ids]])
            assert reply.logprobs == pytest.approx(scored[len(PROMPT) :], abs=1e-4)
        device.close()

    with serving(folder, max_model_len=64) as host:
        run(host, main)

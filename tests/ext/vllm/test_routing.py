"""The experts that vLLM records are those that one fresh pass of transformers' model chooses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.test_routing import chosen
from tests.ext.vllm.host import vllm_host
from tests.limits import HANG_S
from tests.tiny import make_model
from tests.vllm import START_S, needs_vllm
from trireme.config.engine_kind import ROUTING
from trireme.engines.engine import Sampling
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import start_all, stop_all

pytestmark = [needs_vllm, pytest.mark.slow]
PROMPTS = [[5 + i] * (3 + 40 * i) + [9, 8, 7] for i in range(6)]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_recorded_experts_are_those_of_one_fresh_pass(family: str, tmp_path: Path) -> None:
    """In company, in chunks, with cached prefixes, cut by a stop string, and after new weights."""
    folder, other = (
        make_model(tmp_path / str(seed), family, head_dim=32, layers=3, seed=seed)
        for seed in range(2)
    )
    host = vllm_host(folder, max_model_len=512, enable_prefix_caching=True, **{ROUTING: True})
    long = Sampling(max_tokens=40, n=2, ignore_eos=True)
    stopped = Sampling(max_tokens=200, stop=("e", "a"), ignore_eos=True)

    async def ask(engine: RemoteEngine, prompts: list[list[int]], step: int) -> list[Any]:
        samplings = [stopped if i % 2 else long for i in range(len(prompts))]
        return await asyncio.gather(
            *(
                engine.generate(p, s, key=(step, i, 0))
                for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))
            )
        )

    def check(model: Path, prompts: list[list[int]], replies: list[Any]) -> None:
        for prompt, each in zip(prompts, replies, strict=True):
            for reply in each:
                expected = chosen(model, prompt + reply.ids)[:-1]
                assert reply.routed_experts.shape == expected.shape
                assert (np.sort(reply.routed_experts, -1) == expected).all()

    async def main() -> None:
        await start_all([host], START_S)
        engine = RemoteEngine([host.url], api_key=host.key)
        try:
            first = await ask(engine, PROMPTS, 1)
            assert {reply.stop_reason for each in first for reply in each} == {"stop", "length"}
            check(folder, PROMPTS, first)
            turns = [p + r[0].ids + [6, 7, 8] for p, r in zip(PROMPTS, first, strict=True)]
            [before] = await engine.get_all("/engine/health")
            check(folder, turns, await ask(engine, turns, 2))
            [after] = await engine.get_all("/engine/health")
            assert after["cached_tokens"] > before["cached_tokens"]
            await engine.update_weights(other, 1)
            check(other, PROMPTS, await ask(engine, PROMPTS, 3))
        finally:
            await engine.close()
            await stop_all([host])

    asyncio.run(asyncio.wait_for(main(), START_S + HANG_S))

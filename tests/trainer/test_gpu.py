"""The trainer on a GPU: what a CPU learns, what the engine samples with, and ranks over NCCL."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.ranks import run
from tests.trainer.samples import backend_of, experiences
from tests.trainer.test_close import LIMIT, distance, large_head, outside_top
from trireme.algorithms.recipes import get_recipe
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.engines.weights import fingerprint
from trireme.sync.probe import compare_weights
from trireme.trainer.backend import Backend
from trireme.trainer.head import _product
from trireme.trainer.ranks import Ranks, RankSpec
from trireme.trainer.step import train_step

pytestmark = pytest.mark.gpu
ROWS = [[5, 6, 7, 8, 9], [40, 41, 42]]


def learned(backend: Any) -> list[float]:
    """What a model scores after three steps."""
    recipe = get_recipe(SimpleNamespace(algorithm_type="grpo"))
    for seed in range(3):
        train_step(backend, recipe, experiences(seed), version=0)
    return [value for row in backend.score(ROWS) for value in row]


def on(device: str, folder: Path, **given: Any) -> Backend:
    return backend_of(folder, reference=True, device=device, **given)


def learned_by_rank(place: RankSpec, folder: Path) -> torch.Tensor:
    ranks = Ranks(replace(place, device=f"cuda:{place.rank}"))
    scores = learned(backend_of(folder, ranks, reference=True))
    ranks.close()
    return torch.tensor(scores)


def test_logits_of_bfloat16_factors_are_float32_and_not_rounded() -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(50, 64).cuda().bfloat16(), torch.randn(300, 64).cuda().bfloat16()
    bias = torch.randn(300).cuda().bfloat16()
    exact = states.double() @ weight.double().t() + bias.double()
    assert float((_product(states, weight, bias) - exact).abs().max()) < 1e-4


def test_a_gpu_learns_in_float32_what_a_cpu_learns(tiny_dir: Path) -> None:
    assert learned(on("cuda", tiny_dir)) == pytest.approx(learned(on("cpu", tiny_dir)), abs=1e-3)


def test_ranks_over_nccl_learn_what_a_cpu_learns(tiny_dir: Path, tmp_path: Path) -> None:
    world = torch.cuda.device_count()  # one is allowed
    expected = learned(on("cpu", tiny_dir))
    for got in run(learned_by_rank, tmp_path / "ranks", tiny_dir, world=world):
        assert got.tolist() == pytest.approx(expected, abs=1e-3)


def test_in_bfloat16_the_trainer_scores_what_the_engine_recorded(tmp_path: Path) -> None:
    folder = large_head(tmp_path / "model")
    trainer = on("cuda", folder, dtype="bfloat16")

    async def sampled() -> tuple[list[Any], Any, dict[str, float]]:
        device = Device()
        engine = TorchEngine(
            folder,
            tokenizer=AutoTokenizer.from_pretrained(folder),
            device=device,
            settings=TorchSettings(max_model_len=128, dtype="bfloat16", device="cuda"),
        )
        try:
            replies = await engine.generate(ROWS[0], Sampling(max_tokens=64, n=8, ignore_eos=True))
            greedy = Sampling(max_tokens=64, temperature=0.0, ignore_eos=True)
            [likeliest] = await engine.generate(ROWS[0], greedy)
            return replies, likeliest, await engine.fingerprint()
        finally:
            await engine.close()
            device.close()

    replies, likeliest, prints = asyncio.run(sampled())
    compare_weights(prints, fingerprint(trainer.weights(), "bfloat16"), version=0)
    scored = trainer.score([ROWS[0] + reply.ids for reply in replies])
    own = [value for row in scored for value in row[len(ROWS[0]) :]]
    assert distance(own, [value for reply in replies for value in reply.logprobs]) < LIMIT
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = plain(torch.tensor([ROWS[0] + likeliest.ids])).logits[0, len(ROWS[0]) - 1 : -1]
    assert outside_top(logits, likeliest.ids) == 0

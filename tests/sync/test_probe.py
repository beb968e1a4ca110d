"""Fingerprints tell the trainer's tensors from others, in whatever dtype the engine keeps them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from trireme.engines.device import Device
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.weight_group import fingerprint
from trireme.sync.probe import Gap, Probe, WrongWeights, compare_weights


def test_two_numbers_that_change_places_change_the_fingerprint() -> None:
    one, other = torch.randn(8, 8), torch.randn(100, 100)
    before = fingerprint({"one": one, "other": other}, "float32")
    one[0, 0], one[3, 3] = one[3, 3].clone(), one[0, 0].clone()
    after = fingerprint({"one": one, "other": other}, "float32")
    assert after["one"] != before["one"] and after["other"] == before["other"]


def test_a_step_of_a_small_learning_rate_changes_the_fingerprint_of_a_large_tensor() -> None:
    weight = torch.randn(1000, 1024) / 50
    moved = weight + 1e-6 * torch.randn(1000, 1024).sign()
    assert fingerprint({"w": weight}, "float32") != fingerprint({"w": moved}, "float32")
    columns = weight.clone()
    columns[:, :512] += 1e-6  # half of them: the sample must not stay in the other half
    assert fingerprint({"w": weight}, "float32") != fingerprint({"w": columns}, "float32")


def test_tensors_that_differ_are_named_and_tied_names_need_not_be_given() -> None:
    trainer = {"embed": 1.0, "norm": 2.0, "last": float("nan")}
    compare_weights(None, trainer, version=1)
    compare_weights(
        {"embed": 1.0, "norm": 2.0, "head": 1.0}, {"embed": 1.0, "norm": 2.0}, version=1
    )
    with pytest.raises(
        WrongWeights, match=r"version 4 .* 3 of 3 tensors differ \(norm, last, head"
    ):
        compare_weights({"embed": 1.0, "norm": 2.5, "head": 7.0}, trainer, version=4)


def test_scores_may_differ_by_what_rounding_costs_at_the_size_of_the_logits() -> None:
    def difference(engine: float, trainer: float) -> float:
        gap = Gap.of([0.0, -3.0, engine], [0.0, -3.0, trainer])
        return Probe(9, "float32").judge(gap, version=2)["sync/probe_diff"]

    assert difference(-400.004, -400.0) == pytest.approx(0.004)  # a collapsed model
    for engine, trainer in ((-9.0, -9.004), (-400.2, -400.0), (-9.0, float("-inf"))):
        with pytest.raises(WrongWeights, match="version 2 the engine's log-probabilities differ"):
            difference(engine, trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_shows_the_fingerprints_of_what_it_was_given(tiny_dir: Path, dtype: str) -> None:
    given = load_file(tiny_dir / "model.safetensors")
    newer = {name: tensor + 1e-3 * torch.randn_like(tensor) for name, tensor in given.items()}

    async def main() -> None:
        device = Device(1)
        engine = TorchEngine(
            tiny_dir,
            tokenizer=AutoTokenizer.from_pretrained(tiny_dir),
            device=device,
            max_model_len=64,
            dtype=dtype,
        )
        try:
            with pytest.raises(WrongWeights):
                shown = await engine.fingerprint()
                compare_weights(shown, fingerprint(newer, dtype), version=1)
            await engine.update_weights(newer, 1)
            compare_weights(await engine.fingerprint(), fingerprint(newer, dtype), version=1)
        finally:
            await engine.close()
            device.close()

    asyncio.run(main())

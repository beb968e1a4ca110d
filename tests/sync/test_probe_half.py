"""The probe in bfloat16: what rounding is it measures first, and then tells wrong weights from it.

The model is small and its head is not: logits of some 25, as trained models have, over a vocabulary
of thousands. `python -m tests.sync.test_probe_half 1000 32000` makes 1,000 pushes over 32,000
tokens and prints what it saw.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import make_tokenizer
from tests.trainer.samples import settings
from trireme.engines.device import Device
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings, load_weights
from trireme.engines.weights import fingerprint
from trireme.sync.probe import Gap, Probe, WrongWeights
from trireme.trainer.backend import Backend

LARGEST_LOGIT = 25.0


def realistic(
    folder: Path, vocabulary: int, family: str = "llama", seed: int = 0, **sizes: Any
) -> Path:
    """A random model whose largest logits are 25."""
    config = AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **sizes,
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "layers" in name:
                parameter.mul_(8)  # or attention does next to nothing
        ids = torch.randint(0, vocabulary, (1, 64))
        model.lm_head.weight.mul_(LARGEST_LOGIT / model(ids).logits.abs().max())
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def swapped(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Two layers in each other's place."""

    def other(name: str) -> str:
        return re.sub(r"layers\.(\d)", lambda found: f"layers.{1 - int(found[1])}", name)

    return {name: weights[other(name)] for name in weights}


def wrong_shard(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's second half where its first should be, as by a wrong rank of a split engine."""
    head = weights["lm_head.weight"]
    half = len(head) // 2
    return {**weights, "lm_head.weight": torch.cat((head[half:], head[:half]))}


def faults(weights: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, dict[str, Tensor]]:
    """What an engine may serve in place of the weights."""
    head = weights["lm_head.weight"]
    before = torch.randn(head.shape, generator=rng) * head.std()
    return {
        "swapped layers": swapped(weights),
        "wrong shard": wrong_shard(weights),
        "a head of before": {**weights, "lm_head.weight": before},
    }


@dataclass
class Seen:
    """What the probe said of many pushes."""

    means: list[float] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    caught: int = 0
    missed: list[str] = field(default_factory=list)
    """Faults that the scores alone did not see."""


async def push_often(folder: Path, pushes: int, faults_each: int) -> Seen:
    """Pushes of a model that moves, each proved; faults are tried between them, by scores alone."""
    backend = Backend(folder, settings(dtype="bfloat16", max_token_len=512))
    device, seen = Device(1), Seen()
    engine = TorchEngine(
        folder,
        tokenizer=make_tokenizer(),
        device=device,
        settings=TorchSettings(max_model_len=256, dtype="bfloat16"),
    )
    vocabulary = backend.module.config.vocab_size
    probe, rng = Probe(vocabulary, "bfloat16"), torch.Generator().manual_seed(1)

    async def score(ids: list[int]) -> list[float]:
        return backend.score([ids])[0]

    async def prove(served: Any, marks: dict[str, float], version: int) -> dict[str, float]:
        return await probe.prove(served, marks, [await score(probe.ids)], version=version)

    def move() -> None:
        with torch.no_grad():  # as Adam does: by the learning rate, up or down
            for p in backend.module.parameters():
                p += 1e-4 * p.abs().mean() * torch.randn(p.shape, generator=rng).sign()

    async def scores_of(given: Mapping[str, Tensor]) -> Gap:
        load_weights(engine.module, given)
        [found] = await engine.logprobs([probe.ids])
        return Gap.of(found, await score(probe.ids))

    try:
        await probe.calibrate(engine, score)
        stale = backend.module.lm_head.weight.detach().clone()
        for version in range(1, pushes + 1):
            move()
            weights = backend.weights()
            for name, fault in faults(weights, rng).items() if version % faults_each == 0 else ():
                try:
                    probe.judge(await scores_of(fault), version=version)
                    seen.missed.append(f"{name} at push {version}")
                except WrongWeights:
                    seen.caught += 1
            own = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
            await engine.update_weights(own, version)
            marks = fingerprint(weights, "bfloat16")
            try:
                found = await prove(engine, marks, version)
                seen.means.append(found["sync/probe_mean"])
            except WrongWeights as error:
                seen.alarms.append(str(error))
        # by one push: the fingerprint sees it, whatever the scores make of it
        weights = {**backend.weights(), "lm_head.weight": stale}
        load_weights(engine.module, weights)
        with pytest.raises(WrongWeights, match=r"1 of \d+ tensors differ \(lm_head.weight\)"):
            marks = fingerprint(backend.weights(), "bfloat16")
            await prove(engine, marks, pushes)
    finally:
        await engine.close()
        device.close()
    return seen


def test_rounding_raises_no_alarm_and_wrong_weights_do(tmp_path: Path) -> None:
    seen = asyncio.run(push_often(realistic(tmp_path / "model", 4096), pushes=20, faults_each=5))
    assert (seen.alarms, seen.missed, seen.caught) == ([], [], 12)
    assert len(seen.means) == 20 and 0.001 < max(seen.means) < 0.1


def gap(mean: float, p95: float = 0.0, depth: float = 20.0) -> Gap:
    return Gap(mean, mean, p95, 2 * p95, depth)


def test_a_gap_is_judged_by_what_was_measured_first() -> None:
    probe = Probe(99, "bfloat16")
    probe.judge(gap(0.03, 0.2), version=1)  # nothing was measured before: this is the measure
    probe.judge(gap(0.11, 0.7), version=2)
    for wrong in (gap(0.13, 0.2), gap(0.03, 0.9), gap(float("inf"))):
        with pytest.raises(WrongWeights, match=r"version 3 .* measured where both had the same"):
            probe.judge(wrong, version=3)
    probe.judge(gap(0.5, 3.0, depth=200.0), version=4)  # a collapsed model rounds more coarsely
    with pytest.raises(WrongWeights, match=r"by 0.6 in the mean \(at most 0.5 allowed"):
        Probe(99, "bfloat16").judge(gap(0.6), version=1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    count, size = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as place:
        found = asyncio.run(push_often(realistic(Path(place), size), count, faults_each=50))
    mean = sum(found.means) / len(found.means)
    print(
        f"{count} pushes, {size} tokens: {len(found.alarms)} false alarms, gap {mean:.4f} nats in "
        f"the mean (at most {max(found.means):.4f}); by scores alone {found.caught} faults caught, "
        f"{len(found.missed)} missed"
    )
    print("\n".join(found.alarms + found.missed))

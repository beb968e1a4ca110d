"""The memory plan: its weights are the model's, its bytes those that a rank really takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.trainer.ranks import run
from tests.trainer.samples import backend_of
from trireme.batch import of_tokens
from trireme.config.memory import ModelShape, Use, memory_of, shape_of
from trireme.trainer.ranks import Place, Ranks

MB = 2**20
SIZES: Any = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2000,
    "pad_token_id": None,
}


def shape(config: Any) -> ModelShape:
    found = shape_of(config.to_dict())
    assert found is not None
    return found


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_are_those_of_the_model(kind: Any, tied: bool) -> None:
    config = kind(**SIZES, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape(config).weights == sum(p.numel() for p in model.parameters())


def test_a_model_with_experts_has_no_plan() -> None:
    assert shape_of(Qwen2Config(**SIZES).to_dict() | {"num_experts": 8}) is None
    assert shape_of({"model_type": "unknown"}) is None


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def _peak(place: Place, folder: Path, tokens: int, given: dict[str, Any]) -> int:
    """Bytes that a step takes at most that is not the first, beside the interpreter's."""
    ranks = Ranks(place)
    small = backend_of(folder.parent / "small", ranks)
    rows = torch.arange(tokens * place.world).view(-1, 256) * 7 % 1999

    def step(backend: Any, texts: list[list[int]]) -> None:
        batch = of_tokens(texts)
        backend.forward_backward(batch, lambda part, logprobs, _: logprobs.sum())
        backend.step()

    step(small, rows[: place.world].tolist())  # what the first step of any model loads
    before = _status("VmRSS")
    backend = backend_of(folder, ranks, max_token_len=tokens, **given)
    backend.descent.move()  # makes the optimizer's moments
    Path("/proc/self/clear_refs").write_text("5")
    step(backend, rows.tolist())
    peak = _status("VmHWM") - before
    ranks.close()
    return peak


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_plan_is_what_a_rank_takes(checkpointing: bool, tmp_path: Path) -> None:
    folder, tokens = tmp_path / "model", 1024
    AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).save_pretrained(folder)
    small = Qwen2Config(**SIZES | {"hidden_size": 64, "intermediate_size": 64})
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "small")
    use = Use(ranks=2, tokens=tokens, half=False, device="cpu", checkpointing=checkpointing)
    parts = memory_of(shape(AutoConfig.from_pretrained(folder)), use)
    expected = sum(parts.values()) - parts["sync"]  # nothing is pushed here
    given = {"gradient_checkpointing": checkpointing}
    for peak in run(_peak, tmp_path / "ranks", folder, tokens, given):
        said = {name: round(size / MB) for name, size in parts.items()}
        assert expected == pytest.approx(peak, rel=0.15), (round(peak / MB), said)

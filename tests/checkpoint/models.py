"""Models whose every weight is random, and the files that a trainer saves of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from trireme.checkpoint.layout import WEIGHTS, JobFolder, rank_file
from trireme.checkpoint.save import Saving, write_pt, write_weights


def save_checkpoint(
    folder: JobFolder,
    step: int,
    *,
    save: Callable[[Path], None],
    run_state: Mapping[str, Any],
    model_dir: str | Path,
    keep: int | None = None,
    save_critic: Callable[[Path], None] | None = None,
) -> Path:
    """A whole checkpoint; `save(actor)` and `save_critic(critic)` write the models' own files."""
    saving = Saving(folder, step, run_state=run_state, model_dir=model_dir, keep=keep)
    with saving.abandoned_on_error():
        save(saving.actor)
        if save_critic is not None:
            save_critic(saving.critic)
    return saving.finish()


def random_model(folder: Path, arch: str, *, tie: bool, vocab: int = 100) -> Path:
    """Eight query heads over four key/value heads; Qwen3's are wider than the model's width."""
    kinds = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
    config = kinds[arch](
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
        **({"head_dim": 8} if arch == "qwen3" else {}),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if "norm" in name else 0.3
            parameter.copy_(torch.randn_like(parameter) * 0.2 * scale + ("norm" in name))
    model.save_pretrained(folder)
    return folder


def save_whole(
    actor: Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    extra: Mapping[str, Any],
    hf: bool,
) -> None:
    """The files of a trainer that is one process."""
    write_weights((actor / "huggingface" if hf else actor) / WEIGHTS, weights)
    write_pt(actor / rank_file("optim", 1, 0), optimizer)
    write_pt(actor / rank_file("extra_state", 1, 0), extra)

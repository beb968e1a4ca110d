"""Ends: which token ids end a reply of a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """End-of-sequence ids of the generation configuration, the model's and the tokenizer's."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for owner in (generation, model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            found.update(ids if isinstance(ids, list | tuple) else [ids])
    return found


def end_tokens_of(path: str, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The same of a model's folder, without loading its weights."""
    generation = None
    if (Path(path) / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(path)
    config = AutoConfig.from_pretrained(path)
    return end_tokens(SimpleNamespace(generation_config=generation, config=config), tokenizer)

"""Complete: whether a folder's safetensors files hold a whole model, told from their headers."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from trireme.checkpoint.source import Shape
from trireme.config.weights import model_shapes, weight_files


def incomplete(hf: Path, expected: dict[str, Shape] | None) -> str | None:
    """Why a folder's weights are not whole; None where they are.

    Each file is as long as its header says, each shard of an index is there, and each expected
    tensor too, in its shape. Where what to expect is not known: as many layers as the configuration
    names, an embedding, and a head if it is not tied.
    """
    if not weight_files(hf):
        return "no weights there yet"
    try:
        shapes = model_shapes(hf)
    except ValueError as error:
        return str(error)
    for name, shape in (expected or {}).items():
        if shapes.get(name) != shape:
            has = f"is {list(shapes[name])}" if name in shapes else "is missing"
            return f"tensor {name} {has}; expected {list(shape)}"
    config = hf / "config.json"
    if expected is None and config.exists():
        return _against_config(list(shapes), json.loads(config.read_text(encoding="utf-8")))
    return None


def expected_shapes(config: Path) -> dict[str, Shape] | None:
    """Every tensor that the model of a config.json saves; tied ones once.

    None where transformers does not know the model, or stores it under other names than it has.
    """
    return _shapes_of(config.read_text(encoding="utf-8"))


@lru_cache(maxsize=4)  # a job's checkpoints have one configuration
def _shapes_of(text: str) -> dict[str, Shape] | None:
    import torch
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    values: dict[str, Any] = json.loads(text)
    kind = values.pop("model_type", None)
    if kind not in CONFIG_MAPPING or get_checkpoint_conversion_mapping(kind):
        return None
    try:
        config = CONFIG_MAPPING[kind](**values)
    except Exception as error:  # its validators raise errors of several libraries
        raise ValueError(f"config.json is no configuration of {kind}: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = model.all_tied_weights_keys
    return {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in tied}


def _against_config(names: list[str], config: dict[str, Any]) -> str | None:
    """What a configuration promises and the names don't show."""
    layers = config.get("num_hidden_layers", 0)
    for layer in range(layers):
        if not any(f"layers.{layer}." in name or f"h.{layer}." in name for name in names):
            return f"layer {layer} of {layers} is missing"
    if not any("embed" in name or "wte" in name for name in names):
        return "the embedding is missing"
    if config.get("tie_word_embeddings") is False and not any("lm_head" in name for name in names):
        return "the head is missing, and the configuration does not tie it"
    return None

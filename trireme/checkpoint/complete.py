"""Complete: whether a folder's safetensors files hold a whole model, told from their headers."""

from __future__ import annotations

import json
import os
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from trireme.checkpoint.export import INDEX
from trireme.checkpoint.source import Shape


def incomplete(hf: Path, expected: dict[str, Shape] | None) -> str | None:
    """Why a folder's weights are not whole; None where they are.

    Each file is as long as its header says, each shard of an index is there, and each expected
    tensor too, in its shape. Where what to expect is not known: as many layers as the configuration
    names, an embedding, and a head if it is not tied.
    """
    files = weight_files(hf)
    if not files:
        return "no weights there yet"
    shapes: dict[str, Shape] = {}
    for path in files:
        try:
            shapes |= read_shapes(path)
        except (OSError, ValueError) as error:
            return f"{path.name}: {error}"
    index = hf / INDEX
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted(set(listed) - set(shapes))
        if missing:
            return f"{listed[missing[0]]} with tensor {missing[0]} is missing"
    for name, shape in (expected or {}).items():
        if shapes.get(name) != shape:
            has = f"is {list(shapes[name])}" if name in shapes else "is missing"
            return f"tensor {name} {has}; expected {list(shape)}"
    config = hf / "config.json"
    if expected is None and config.exists():
        return _against_config(list(shapes), json.loads(config.read_text(encoding="utf-8")))
    return None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    return sorted(folder.glob("*.safetensors"))


def read_shapes(path: Path) -> dict[str, Shape]:
    """Name and shape of every tensor of a file, from its header. Raises ValueError if it is cut."""
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        text = file.read(length) if 0 < length < 2**30 else b""
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError("is no safetensors file, or a cut one") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if os.path.getsize(path) != 8 + length + end:
        raise ValueError(f"has {os.path.getsize(path)} bytes instead of {8 + length + end}")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


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

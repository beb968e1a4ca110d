"""Composite: a checkpoint with a language model and towers for pictures or sound.

Text alone is sampled and trained here. The whole model is loaded, by the class that its
`architectures` name, so that every tensor has the name that other programs know; forward passes go
through the language model, and the towers are frozen. An engine has them from its folder, and new
weights come without them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from trireme.config.lookup import names_in, tensor_files

_KINDS: tuple[tuple[Any, Any], ...] = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
)


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that makes what a configuration's `architectures` name; for code of
    the folder's own, and where nothing is named, AutoModelForCausalLM.
    """
    named = getattr(config, "architectures", None) or ()
    known = [(auto, mapping.get(type(config), None)) for auto, mapping in _KINDS]
    for auto, made in known:
        if made is not None and made.__name__ in named:
            return auto
    return next((auto for auto, made in known if made is not None), AutoModelForCausalLM)


def load_whole(
    path: str | Path, config: PreTrainedConfig, *, device: str, **options: Any
) -> PreTrainedModel:
    """Load a folder's model by the class that it names. Raises ValueError if its files lack
    tensors, for which transformers draws random numbers.
    """
    made: Any = auto_class(config).from_pretrained(
        path, config=config, output_loading_info=True, **options
    )
    model, said = made
    if missing := sorted(said["missing_keys"]):
        raise ValueError(
            f"{path} lacks {len(missing)} tensors of {type(model).__name__} "
            f"({', '.join(missing[:3])}): expected all, by the names that transformers reads"
        )
    return model.to(device)


def is_composite(config: PreTrainedConfig) -> bool:
    """Return whether a configuration has a language model's as a part."""
    return config.get_text_config() is not config


def text_model(model: PreTrainedModel) -> nn.Module:
    """Return the part that turns token ids into hidden states."""
    if is_composite(model.config):
        return model.get_decoder()
    base: Any = model.base_model  # the model itself for Llama 4, whose prefix is a composite's
    return base.model if base is model else base


def towers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a composite that text does not pass through, with their
    names.
    """
    if not is_composite(model.config):
        return
    head = model.get_output_embeddings()
    parts = [text_model(model), *([] if head is None else [head])]
    used = {id(tensor) for part in parts for tensor in chain(part.parameters(), part.buffers())}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if id(tensor) not in used:
            yield name, tensor


def towers_in_files(folder: str | Path) -> dict[str, str]:
    """Return the tensors of the towers that a folder's files have: name -> name in the files. Empty
    if it is no composite.
    """
    config = AutoConfig.from_pretrained(folder)
    if not is_composite(config):
        return {}
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    files = tensor_files(folder)
    held = {name: names_in(files, name) for name, _ in towers(model)}
    return {name: one for name, one in held.items() if isinstance(one, str) and one in files}


def may_stay(model: PreTrainedModel, received: Container[str]) -> set[str]:
    """Return the names of tensors that new weights may lack: those of the towers, if none of them
    is among the `received`.
    """
    names = {name for name, _ in towers(model)}
    return set() if any(name in received for name in names) else names

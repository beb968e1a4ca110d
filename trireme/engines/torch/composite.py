"""Composite: a checkpoint with a language model and towers for pictures or sound.

Text alone is sampled and trained here. The whole model is loaded, by the class that its
`architectures` name, so that every tensor has the name that other programs know; forward passes go
through the language model, and the towers are frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

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


def is_composite(config: PreTrainedConfig) -> bool:
    """Return whether a configuration has a language model's as a part."""
    return config.get_text_config() is not config


def text_model(model: PreTrainedModel) -> nn.Module:
    """Return the part that turns token ids into hidden states."""
    if is_composite(model.config):
        return model.get_decoder()
    base: Any = model.base_model  # the model itself for Llama 4, whose prefix is a composite's
    return base.model if base is model else base


def towers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a composite that text does not pass through, with their names."""
    if not is_composite(model.config):
        return
    head = model.get_output_embeddings()
    parts = [text_model(model), *([] if head is None else [head])]
    used = {id(parameter) for part in parts for parameter in part.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in used:
            yield name, parameter

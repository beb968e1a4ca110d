"""Specimen: a small model of an architecture, on which forward passes of ours are proved.

Engine and trainer run an architecture by their own code only if it agrees with transformers'. On a
model's own weights that is a matter of chance: a trained model amplifies rounding on rows that it
does not know (SmolLM2-135M by 10,000), so that a resume could choose another forward pass than the
run that it continues. A specimen has the architecture's widths and kinds of layers, and weights
that depend on nothing else.
"""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from trireme.engines.torch.composite import auto_class, is_composite
from trireme.engines.torch.linear import quicken
from trireme.engines.torch.recurrent import keep_kernels_on_gpus, refuse_unknown

VOCABULARY = 1024
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_SPREAD = 1.5
"""Of a product's results if its inputs have 1: attention then prefers some tokens to others."""


def make_specimen(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Make the specimen of a configuration: as many layers as show every kind that there is, at
    least two, and at most VOCABULARY tokens. `attention` is an implementation's name. Raises
    ValueError for layers of an unknown kind.
    """
    refuse_unknown(config)
    config = copy.deepcopy(config)
    text = config.get_text_config()
    kinds: list[str] = list(getattr(text, "layer_types", None) or [])
    _shorten(text, max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    if is_composite(config):
        _shorten_towers(config, text)
    if text.vocab_size > VOCABULARY:
        text.vocab_size = VOCABULARY
        for one in (config, text):
            for name in _SPECIAL:
                if hasattr(one, name):
                    setattr(one, name, None)
    with torch.random.fork_rng(devices=[]):  # a run's own draws stay what they are
        torch.manual_seed(0)
        model = auto_class(config).from_config(
            config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            **({} if attention is None else {"attn_implementation": attention}),
        )
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=_SPREAD * weight.shape[-1] ** -0.5, generator=draws)
            else:  # norms and biases, which begin at one number each
                weight.add_(torch.empty_like(weight).normal_(std=0.1, generator=draws))
    quicken(model)  # as engine and trainer do with the model itself
    keep_kernels_on_gpus(model)
    return model.eval().requires_grad_(False)


def _shorten(text: PreTrainedConfig, layers: int) -> None:
    """Leave a configuration at most so many layers, in each of its lists that name one a layer."""
    present = text.num_hidden_layers
    if layers >= present:
        return
    for name, value in [*vars(text).items()]:
        if isinstance(value, list) and len(value) == present:
            setattr(text, name, value[:layers])
    if text.num_hidden_layers != layers:  # some count the entries of such a list
        text.num_hidden_layers = layers


def _shorten_towers(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Give one layer to each part that is no language model: no token passes through it."""
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig) and part is not text:
            for name in ("num_hidden_layers", "depth"):
                if getattr(part, name, None):
                    setattr(part, name, 1)

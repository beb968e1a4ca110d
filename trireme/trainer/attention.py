"""Attention: computes attention over a flat, packed micro-batch, by the kernel of its layout.

Registered with transformers under the name `trireme_packed`, without a mask function of that name,
so that the model builds no mask of its own. The layout comes as the keyword `packed` of the model's
forward; linear layers, norms and experts see each flat token once.

Dropout of attention weights is off: a ratio of probabilities compares one and the same network.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from trireme.engines.torch.rows import refuse_plans
from trireme.trainer.pack import PackedBatch

NAME = "trireme_packed"

# Extras that some architectures hand to their attention and this one does not compute.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: PackedBatch | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key, value [1, Hkv, T, D] of flat tokens -> ([1, T, H, D], None)."""
    if packed is None:
        raise ValueError("a model with packed attention is called through trainer.model only")
    for name in _UNKNOWN:
        if extras.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} wants '{name}' in its attention: not supported"
            )
    out = packed.attention.attend(query, key, value, window=sliding_window or 0, scale=scaling)
    return out, None


def register() -> None:
    """Make `attn_implementation="trireme_packed"` known to transformers; again does nothing."""
    AttentionInterface.register(NAME, packed_attention)
    refuse_plans()

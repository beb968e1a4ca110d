"""Attention: computes attention over a flat, packed micro-batch, row by row.

Registered with transformers under the name `trireme_packed`, without a mask function of that name,
so that the model builds no mask of its own. The layout comes as the keyword `packed` of the model's
forward; linear layers, norms and experts see each flat token once.

Dropout of attention weights is off: a ratio of probabilities compares one and the same network.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from trireme.engines.torch.rows import attend, refuse_plans
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
    flat_query, flat_key, flat_value = (_flat(x) for x in (query, key, value))
    outputs = []
    for rows in packed.rows:
        bias = rows.bias(sliding_window or 0)
        attended = attend(
            _take(flat_query, rows.queries, query.shape[1]),
            _take(flat_key, rows.keys, key.shape[1]),
            _take(flat_value, rows.keys, value.shape[1]),
            mask=bias,
            causal=bias is None,
            scale=scaling,
        )
        outputs.append(attended.transpose(1, 2).reshape(rows.queries.numel(), -1))
    out = select(torch.cat(outputs) if len(outputs) > 1 else outputs[0], packed.place)
    return out.view(1, len(packed.place), query.shape[1], -1), None


def register() -> None:
    """Make `attn_implementation="trireme_packed"` known to transformers; again does nothing."""
    AttentionInterface.register(NAME, packed_attention)
    refuse_plans()


def _flat(x: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H * D]"""
    return x[0].transpose(0, 1).reshape(x.shape[2], -1)


def _take(flat: Tensor, index: Tensor, heads: int) -> Tensor:
    """Rows [R, L] of flat tokens [T, H * D] -> [R, H, L, D]"""
    taken = select(flat, index.reshape(-1))
    return taken.view(*index.shape, heads, -1).transpose(1, 2)


def select(flat: Tensor, index: Tensor) -> Tensor:
    """flat[index]; on a CPU by `gather`, whose backward is several times faster there.

    On a GPU that backward adds up rounded numbers in any order; that of an index sorts them first.
    """
    if flat.is_cuda:
        return flat[index]
    return flat.gather(0, index[:, None].expand(-1, flat.shape[1]))

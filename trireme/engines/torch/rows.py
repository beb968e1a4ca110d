"""Rows: the keys and values of running requests, and how the model's attention reads and writes
them.

Active requests hold rows 0 .. B-1 without a gap, so that decoding attends over a view and copies
nothing. Registered with transformers as `trireme_rows`, without a mask function of that name, so
that the model builds no mask; the rows of a forward pass are passed as the keyword `rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

NAME = "trireme_rows"
GRAIN = 64
GPU = "cuda"
_UNKNOWN = ("softcap", "position_bias")


class RowStore:
    """Stores keys and values [rows, Hkv, length, D] of each layer; grows to about `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._layers: list[Tensor] = []
        """Keys and values of each layer together [2, rows, Hkv, length, D]: moved in one
        operation."""
        self._views: list[tuple[Tensor, Tensor]] = []
        self._shape = (0, 0)

    @property
    def num_rows(self) -> int:
        """Return the number of rows that there is room for."""
        return self._shape[0]

    @property
    def room(self) -> int:
        """Return the number of tokens that there is room for, in all rows together."""
        return self._shape[0] * self._shape[1]

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens; the present ones stay."""
        have_rows, have_length = self._shape
        if rows <= have_rows and length <= have_length:
            return
        length = max(have_length, -(-length // GRAIN) * GRAIN)
        rows = max(have_rows, rows)
        self._shape = (rows, length)
        for layer, old in enumerate(self._layers):
            new = old.new_zeros(2, rows, old.shape[2], length, old.shape[4])
            new[:, : old.shape[1], :, : old.shape[3]] = old
            self._layers[layer], self._views[layer] = new, (new[0], new[1])

    def fit(self, rows: int, length: int) -> None:
        """Give up room that `rows` rows of `length` tokens do not need, the present ones among
        them, if with it there would be more than `max_tokens`: as many rows as many short requests
        needed before, each as long as a long one needed.
        """
        have_rows, have_length = self._shape
        length = -(-length // GRAIN) * GRAIN
        if max(have_rows, rows) * max(have_length, length) <= self.max_tokens:
            return
        self._shape = rows, length = min(have_rows, rows), min(have_length, length)
        if (rows, length) == (have_rows, have_length):
            return
        for layer, old in enumerate(self._layers):
            new = old[:, :rows, :, :length].clone(memory_format=torch.contiguous_format)
            self._layers[layer], self._views[layer] = new, (new[0], new[1])

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, which are allocated on first use."""
        while len(self._layers) <= index:
            shape = (2, self._shape[0], like.shape[1], self._shape[1], like.shape[3])
            new = like.new_zeros(shape)
            self._layers.append(new)
            self._views.append((new[0], new[1]))
        return self._views[index]

    def copy_row(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of a row into others."""
        for tensor in self._layers:
            if len(targets) == 1:
                tensor[:, targets[0], :, :length] = tensor[:, source, :, :length]
            else:
                tensor[:, targets, :, :length] = tensor[:, source, None, :, :length].clone()

    def row(self, row: int, length: int) -> list[Tensor]:
        """Return views of a row's first tokens: keys and values [2, Hkv, length, D] of each
        layer.
        """
        return [layer[:, row, :, :length] for layer in self._layers]

    def put(self, row: int, saved: list[Tensor], length: int) -> None:
        """Write the first `length` tokens of the tensors that `row` returned into a row."""
        self.layer(len(saved) - 1, saved[0])
        for layer, old in zip(self._layers, saved, strict=True):
            layer[:, row, :, :length] = old[:, :, :length]

    def clear(self) -> None:
        """Release the tensors."""
        self._layers, self._views, self._shape = [], [], (0, 0)


@dataclass
class Pass:
    """The rows of one forward pass, and the positions of their new tokens."""

    store: RowStore
    rows: Tensor | None
    """[B] row of each batch entry; None: rows 0 .. B-1 (decoding)."""
    starts: Tensor
    """[B] tokens that each row already has."""
    lengths: Tensor
    """[B] new tokens of each row, at most the width S of the pass."""
    width: int
    """S"""
    total: int
    """Keys to attend over: the longest row after this pass."""

    @classmethod
    def of(
        cls,
        store: RowStore,
        parts: Sequence[Sequence[int]],
        rows: Sequence[int],
        starts: Sequence[int],
        *,
        device: torch.device,
    ) -> Pass:
        """Prepare a prefill of some rows, and make room for it."""
        total = max(s + len(p) for s, p in zip(starts, parts, strict=True))
        store.reserve(0, total)
        return cls(
            store,
            torch.tensor(rows, device=device),
            torch.tensor(starts, device=device),
            torch.tensor([len(p) for p in parts], device=device),
            max(map(len, parts)),
            total,
        )

    def __post_init__(self) -> None:
        device = self.starts.device
        offsets = torch.arange(self.width, device=device)
        self.positions = self.starts[:, None] + offsets
        self._masks: dict[int, Tensor] = {}
        if self.rows is not None:
            valid = offsets < self.lengths[:, None]
            entry, offset = valid.nonzero(as_tuple=True)
            self.entry, self.offset = entry, offset
            self.write_row = self.rows[entry]
            self.write_at = self.starts[entry] + offset

    def padded(self, x: Tensor) -> Tensor:
        """Pad [N, H, D] of the new tokens alone -> [B, H, S, D], with zeros after short rows."""
        batch = len(self.starts)
        if len(x) != batch * self.width:
            flat, x = x, x.new_zeros(batch * self.width, *x.shape[1:])
            x[self.entry * self.width + self.offset] = flat
        return x.view(batch, self.width, *x.shape[1:]).transpose(1, 2)

    def mask(self, window: int) -> Tensor:
        """Return [B, 1, S, L], true where a new token may attend to a key."""
        if window not in self._masks:
            keys = torch.arange(self.total, device=self.starts.device)
            behind = self.positions[:, :, None] - keys
            seen = behind >= 0
            if window:
                seen &= behind < window
            self._masks[window] = seen[:, None]
        return self._masks[window]


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    rows: Pass | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attend: query [B, H, S, D], key and value [B, Hkv, S, D] of new tokens -> ([B, S, H, D],
    None). `s_aux` [H]: sinks, see `attend`.
    """
    if rows is None:
        raise ValueError("a model with row attention is called by the engine only")
    for name in _UNKNOWN:
        if extras.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} wants '{name}' in its attention: not supported"
            )
    if value.shape != key.shape:
        raise ValueError(
            f"{type(module).__name__} has values of {value.shape[3]} numbers and keys of "
            f"{key.shape[3]}: the embedded engine cannot store them"
        )
    keys, values = rows.store.layer(int(module.layer_idx), key)  # pyright: ignore
    batch = query.shape[0]
    if rows.rows is None:
        index = torch.arange(batch, device=key.device)
        keys[index, :, rows.starts] = key[:, :, 0]
        values[index, :, rows.starts] = value[:, :, 0]
        all_keys, all_values = keys[:batch, :, : rows.total], values[:batch, :, : rows.total]
    else:
        keys[rows.write_row, :, rows.write_at] = key[rows.entry, :, rows.offset]
        values[rows.write_row, :, rows.write_at] = value[rows.entry, :, rows.offset]
        all_keys = keys[rows.rows, :, : rows.total]
        all_values = values[rows.rows, :, : rows.total]
    mask = rows.mask(sliding_window or 0)
    out = attend(query, all_keys, all_values, mask=mask, scale=scaling, sinks=s_aux)
    return out.transpose(1, 2), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of query [B, H, Q, D] over key and value [B, Hkv, K, D] -> [B, H, Q, D].

    `sinks` [H]: a score that each head's softmax has besides those of the keys, without a value. On
    a GPU the kernels that accept a mask, or float32, accept no grouped heads: torch's fallback
    stores all scores [B, H, Q, K] at once.
    """
    if sinks is not None:
        if query.shape[2] == 1:
            return attend_one(query, key, value, mask, scale, sinks)
        width = value.shape[-1]
        query, key, value, mask, scale = with_sink_key(
            query, key, value, mask, causal, scale, sinks
        )
        return attend(query, key, value, mask=mask, scale=scale)[..., :width]
    if query.device.type == GPU and (type(mask) is Tensor or query.dtype == torch.float32):
        if query.shape[2] == 1:
            return attend_one(query, key, value, mask, scale)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def with_sink_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    sinks: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:
    """Make the sinks a key, so that any kernel computes them and their gradient: it is the first,
    every query sees it, and its value is 0.

    Heads get one number more for its score: sink / scale in queries, 1 in this key, and 0 in the
    others. The mask remains one for all heads. Zeros follow up to a multiple of 8, without which a
    GPU's kernels with a mask take no bfloat16.
    """
    width = query.shape[-1]
    more = 8 - width % 8
    factor: float = width**-0.5 if scale is None else scale
    scores = (sinks / factor).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    query = F.pad(torch.cat([query, scores], -1), (0, more - 1))
    key, value = (F.pad(x, (0, more, 1, 0)) for x in (key, value))
    key[:, :, 0, width] = 1
    if type(mask) is Tensor:
        mask = F.pad(mask, (1, 0), value=True)
    elif mask is not None:  # known by its name
        mask = causal_lower_right(query.shape[2], key.shape[2])
    elif causal:
        mask = key.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1)
    return query, key, value, mask, factor


def attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attend` of one query [B, H, 1, D]: the heads of a group become queries, so that keys
    and values are not repeated.

    With sinks its scores are stored: a further key would be a copy of all keys in every step.
    """
    together = query.view(query.shape[0], key.shape[1], -1, query.shape[3])
    if sinks is None:
        out = F.scaled_dot_product_attention(together, key, value, attn_mask=mask, scale=scale)
        return out.reshape(query.shape)
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (together * factor) @ key.transpose(2, 3)
    if type(mask) is Tensor:
        scores = scores.masked_fill(~mask, -torch.inf)
    last = sinks.to(scores.dtype).view(1, key.shape[1], -1, 1).expand(len(scores), -1, -1, 1)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.cat([scores, last], -1).softmax(-1, dtype=exact)[..., :-1].to(value.dtype)
    return (weights @ value).view(*query.shape[:3], -1)


def register() -> None:
    """Make `attn_implementation="trireme_rows"` known to transformers; further calls do nothing."""
    AttentionInterface.register(NAME, rows_attention)
    refuse_plans()


def refuse_plans() -> None:
    """Disable cuDNN's attention, which takes about a second for each new shape; there are many
    here.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)

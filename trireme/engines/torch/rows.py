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
from transformers import AttentionInterface

NAME = "trireme_rows"
GRAIN = 64
GPU = "cuda"
_UNKNOWN = ("softcap", "s_aux", "position_bias")


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
    rows: Pass | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attend: query [B, H, S, D], key and value [B, Hkv, S, D] of new tokens -> ([B, S, H, D],
    None).
    """
    if rows is None:
        raise ValueError("a model with row attention is called by the engine only")
    for name in _UNKNOWN:
        if extras.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} wants '{name}' in its attention: not supported"
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
    out = attend(query, all_keys, all_values, mask=rows.mask(sliding_window or 0), scale=scaling)
    return out.transpose(1, 2), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute attention of query [B, H, Q, D] over key and value [B, Hkv, K, D] -> [B, H, Q, D].

    On a GPU the kernels that accept a mask, or float32, accept no grouped heads: torch's fallback
    stores all scores [B, H, Q, K] at once.
    """
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


def attend_one(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Compute `attend` of one query [B, H, 1, D]: the heads of a group become queries, so that keys
    and values are not repeated.
    """
    together = query.view(query.shape[0], key.shape[1], -1, query.shape[3])
    out = F.scaled_dot_product_attention(together, key, value, attn_mask=mask, scale=scale)
    return out.reshape(query.shape)


def register() -> None:
    """Make `attn_implementation="trireme_rows"` known to transformers; further calls do nothing."""
    AttentionInterface.register(NAME, rows_attention)
    refuse_plans()


def refuse_plans() -> None:
    """Disable cuDNN's attention, which takes about a second for each new shape; there are many
    here.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)

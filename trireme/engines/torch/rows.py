"""Rows: the keys and values of running requests, and how the model's attention reads and writes
them.

Active requests hold rows 0 .. B-1 without a gap, so that decoding attends over a view and copies
nothing. Registered with transformers as `trireme_rows`, without a mask function of that name, so
that the model builds no mask; what a forward pass concerns comes as the keyword `rows`.
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
    """Keys and values [rows, Hkv, length, D] of each layer; grows, never past `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._layers: list[Tensor] = []
        """Keys and values of each layer side by side [2, rows, Hkv, length, D]: moved in one go."""
        self._views: list[tuple[Tensor, Tensor]] = []
        self._shape = (0, 0)

    @property
    def num_rows(self) -> int:
        """How many there is room for."""
        return self._shape[0]

    def reserve(self, rows: int, length: int) -> None:
        """Room for `rows` rows of `length` tokens; keeps what is there."""
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

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, made at its first use."""
        while len(self._layers) <= index:
            shape = (2, self._shape[0], like.shape[1], self._shape[1], like.shape[3])
            new = like.new_zeros(shape)
            self._layers.append(new)
            self._views.append((new[0], new[1]))
        return self._views[index]

    def copy_row(self, source: int, targets: list[int], length: int) -> None:
        """The first `length` tokens of a row into others."""
        for tensor in self._layers:
            if len(targets) == 1:
                tensor[:, targets[0], :, :length] = tensor[:, source, :, :length]
            else:
                tensor[:, targets, :, :length] = tensor[:, source, None, :, :length].clone()

    def row(self, row: int, length: int) -> list[Tensor]:
        """Views of a row's first tokens: keys and values [2, Hkv, length, D] of each layer."""
        return [layer[:, row, :, :length] for layer in self._layers]

    def put(self, row: int, saved: list[Tensor], length: int) -> None:
        """Write the first `length` tokens of what `row` gave into a row."""
        self.layer(len(saved) - 1, saved[0])
        for layer, old in zip(self._layers, saved, strict=True):
            layer[:, row, :, :length] = old[:, :, :length]

    def clear(self) -> None:
        """Forget the tensors."""
        self._layers, self._views, self._shape = [], [], (0, 0)


@dataclass
class Pass:
    """The rows of one forward pass, and the places of their new tokens."""

    store: RowStore
    rows: Tensor | None
    """[B] row of each batch entry; None: rows 0 .. B-1 (decoding)."""
    starts: Tensor
    """[B] tokens that each row already holds."""
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
        """A prefill of some rows, for which it makes room."""
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
        """[N, H, D] of the new tokens alone -> [B, H, S, D], with zeros behind short rows."""
        batch = len(self.starts)
        if len(x) != batch * self.width:
            flat, x = x, x.new_zeros(batch * self.width, *x.shape[1:])
            x[self.entry * self.width + self.offset] = flat
        return x.view(batch, self.width, *x.shape[1:]).transpose(1, 2)

    def mask(self, window: int) -> Tensor:
        """[B, 1, S, L] true where a new token sees a key."""
        if window not in self._masks:
            keys = torch.arange(self.total, device=self.starts.device)
            behind = self.positions[:, :, None] - keys
            seen = behind >= 0
            if window:
                seen &= behind < window
            self._masks[window] = seen[:, None]
        return self._masks[window]


@dataclass
class Where:
    """The position of each row of a lean decode step, from one step to the next.

    A row's first `shared` tokens lie in slot `slots` of the shared prompts, the rest in the row.
    """

    positions: Tensor
    """[B] of the new tokens"""
    lengths: Tensor
    """[B] tokens in the row itself, the new one included"""
    slots: Tensor
    """[B]"""
    shared: Tensor
    """[B]"""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]], device: torch.device) -> Where:
        """Build it from each row's number of computed tokens, slot, and number of tokens in that
        slot.
        """
        cached, slots, shared = torch.tensor(rows, device=device).unbind(1)
        return cls(
            cached.contiguous(), cached - shared + 1, slots.contiguous(), shared.contiguous()
        )

    def __post_init__(self) -> None:
        self.longest = int(self.lengths.max())
        self.longest_shared = int(self.shared.max())
        self.num_slots = int(self.slots.max()) + 1
        self._even = bool((self.lengths == self.longest).all())
        self._even_shared = bool((self.shared == self.longest_shared).all())
        self._flat: Tensor | None = None
        self._bias: Tensor | None = None
        self._by_slot: tuple[Tensor, Tensor] | None = None

    def next(self) -> None:
        """One token more in every row."""
        self.positions += 1
        self.lengths += 1
        self.longest += 1
        self._flat = self._bias = None

    def flat(self, num_keys: int, room: int) -> Tensor:
        """[B * K] where the new tokens go in a layer's keys, seen as [rows * K * room, D]."""
        if self._flat is None:
            heads = torch.arange(len(self.lengths) * num_keys, device=self.lengths.device)
            self._flat = heads * room + (self.lengths - 1).repeat_interleave(num_keys)
        return self._flat

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """[B, shared + own] -inf where a row has no key; None where all rows are equally long."""
        if self._even and self._even_shared:
            return None
        if self._bias is None:
            parts = []
            for longest, lengths in (
                (self.longest_shared, self.shared),
                (self.longest, self.lengths),
            ):
                parts.append(torch.arange(longest, device=lengths.device) < lengths[:, None])
            seen = torch.cat(parts, 1)
            self._bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._bias.masked_fill_(~seen, -torch.inf)
        return self._bias

    def to_slots(self, x: Tensor) -> Tensor:
        """[B, K, group, W] -> [slots * K, members * group, W], a slot's members side by side."""
        members, _ = self._members()
        _, num_keys, group, width = x.shape
        out = x[members.flatten()].view(*members.shape, num_keys, group, width).transpose(1, 2)
        return out.reshape(members.shape[0] * num_keys, -1, width)

    def to_rows(self, x: Tensor, num_keys: int) -> Tensor:
        """The way back: -> [B, K, group, W], zeros where a row shares nothing."""
        members, index = self._members()
        slots, most = members.shape
        out = x.view(slots, num_keys, most, -1, x.shape[-1]).transpose(1, 2)
        out = out.reshape(slots * most, num_keys, -1, x.shape[-1])[index]
        return out if self._even_shared else out * (self.shared > 0)[:, None, None, None]

    def _members(self) -> tuple[Tensor, Tensor]:
        """[slots, members] the rows of each slot, padded with row 0; [B] where a row is there."""
        if self._by_slot is None:
            rows: list[list[int]] = [[] for _ in range(self.num_slots)]
            places = []
            pairs = zip(self.slots.tolist(), self.shared.tolist(), strict=True)
            for row, (slot, shared) in enumerate(pairs):
                places.append((slot, len(rows[slot])) if shared else (0, 0))
                if shared:
                    rows[slot].append(row)
            most = max(map(len, rows))
            padded = [[*row, *[0] * (most - len(row))] for row in rows]
            device = self.slots.device
            self._by_slot = (
                torch.tensor(padded, device=device),
                torch.tensor([slot * most + at for slot, at in places], device=device),
            )
        return self._by_slot


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
    """query [B, H, S, D], key and value [B, Hkv, S, D] of new tokens -> ([B, S, H, D], None)."""
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
    """Attention of query [B, H, Q, D] over key and value [B, Hkv, K, D] -> [B, H, Q, D].

    On a GPU the kernels that take a mask, or float32, take no grouped heads: what torch falls back
    to holds all scores [B, H, Q, K] at once.
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
    """`attend` of one query [B, H, 1, D]: the heads of a group are queries side by side, so that
    keys and values are not repeated.
    """
    together = query.view(query.shape[0], key.shape[1], -1, query.shape[3])
    out = F.scaled_dot_product_attention(together, key, value, attn_mask=mask, scale=scale)
    return out.reshape(query.shape)


def register() -> None:
    """Make `attn_implementation="trireme_rows"` known to transformers; again does nothing."""
    AttentionInterface.register(NAME, rows_attention)
    refuse_plans()


def refuse_plans() -> None:
    """Without cuDNN's attention, which takes about a second for each new shape; ours are many."""
    torch.backends.cuda.enable_cudnn_sdp(False)

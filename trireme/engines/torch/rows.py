"""Rows: what running requests remember, and how the model's layers read and write it: keys and
values, and the states of layers that have one.

Active requests hold rows 0 .. B-1 without a gap, so that decoding attends over a view and copies
nothing. Registered with transformers as `trireme_rows`, without a mask function of that name, so
that the model builds no mask; the rows of a forward pass are passed as the keyword `rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from trireme.engines.torch.recurrent import Call, State
from trireme.engines.torch.routing import RoutingShape

NAME = "trireme_rows"
GRAIN = 64
GPU = "cuda"
_UNKNOWN = ("softcap", "position_bias")
_ROUTING = -1
"""The number of the layer that stands for the routing: see `RowStore.routing`."""


@dataclass(frozen=True, eq=False)
class SavedRows:
    """A copy of tokens of several rows, in one tensor a layer: many small copies take several times
    as long.
    """

    layers: dict[int, Tensor]
    """Keys and values [2, rows, Hkv, length, D] of each layer that attends, as long as the longest
    row's."""
    states: dict[int, State]
    """The states [rows, ...] of each layer that has one, after all of these tokens."""

    @cached_property
    def tokens(self) -> int:
        """For how many tokens of keys and values it takes memory, its states included."""
        states = sum(state.numel() for each in self.states.values() for state in each.values())
        if not self.layers:
            return states
        shapes = [layer.shape for layer in self.layers.values()]
        return shapes[0][1] * shapes[0][3] + states // sum(2 * s[2] * s[4] for s in shapes)


@dataclass(frozen=True, eq=False)
class SavedRow:
    """One of several saved rows, and the saved prompt that it shares with others."""

    rows: SavedRows
    at: int
    length: int
    """Its own tokens, after those of the prompt."""
    prompt: SavedRow | None = None

    @property
    def parts(self) -> list[SavedRow]:
        """Return the saved rows that its tokens are in, in their order."""
        return [self] if self.prompt is None else [self.prompt, self]


class RowStore:
    """Stores what rows remember: keys and values [rows, Hkv, length, D] of each layer that attends,
    and the states [rows, ...] of other layers; grows to about `max_tokens`.

    With a `shape` also the experts that computed each token: they lie in the first half of a
    further layer, with a layer of the model in place of a head, and so go wherever keys go.
    """

    def __init__(self, max_tokens: int, shape: RoutingShape | None = None) -> None:
        self.max_tokens = max_tokens
        self.shape = shape
        self._layers: dict[int, Tensor] = {}
        """Keys and values of each layer together [2, rows, Hkv, length, D]: moved in one
        operation."""
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[int, State] = {}
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
        for layer, old in self._layers.items():
            new = old.new_zeros(2, rows, old.shape[2], length, old.shape[4])
            new[:, : old.shape[1], :, : old.shape[3]] = old
            self._layers[layer], self._views[layer] = new, (new[0], new[1])
        if rows > have_rows:
            self._states = _each(
                self._states, lambda old: F.pad(old, (0, 0) * (old.ndim - 1) + (0, rows - len(old)))
            )

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
        for layer, old in self._layers.items():
            new = old[:, :rows, :, :length].clone(memory_format=torch.contiguous_format)
            self._layers[layer], self._views[layer] = new, (new[0], new[1])
        self._states = _each(self._states, lambda old: old[:rows].clone())

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, which are allocated on first use."""
        if index not in self._views:
            shape = (2, self._shape[0], like.shape[1], self._shape[1], like.shape[3])
            new = self._layers[index] = like.new_zeros(shape)
            self._views[index] = new[0], new[1]
        return self._views[index]

    def routing(self, device: torch.device) -> Tensor | None:
        """Return the experts of all tokens [rows, L, length, K]; None if they are not recorded."""
        if self.shape is None:
            return None
        sizes = 0, self.shape.layers, 0, self.shape.chosen
        return self.layer(_ROUTING, torch.empty(sizes, dtype=self.shape.dtype, device=device))[0]

    def states(self, layer: int, rows: Tensor | slice) -> State | None:
        """Return a layer's states of some rows, in a copy if `rows` is a tensor; None before its
        first tokens.
        """
        found = self._states.get(layer)
        return None if found is None else {name: state[rows] for name, state in found.items()}

    def put_states(self, layer: int, rows: Tensor | slice, states: State) -> None:
        """Overwrite a layer's states of some rows."""
        held = self._states.setdefault(layer, {})
        for name, state in states.items():
            if name not in held:
                held[name] = state.new_zeros(self._shape[0], *state.shape[1:])
            held[name][rows] = state

    def copy_row(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of a row, all that it has, into others."""
        for tensor in self._layers.values():
            if len(targets) == 1:
                tensor[:, targets[0], :, :length] = tensor[:, source, :, :length]
            else:
                tensor[:, targets, :, :length] = tensor[:, source, None, :, :length].clone()
        for states in self._states.values():
            for state in states.values():
                state[targets] = state[source].clone()

    def move(self, sources: list[int], targets: list[int], lengths: list[int]) -> None:
        """Copy all tokens of each row, so many, into another one."""
        layers = self._layers.values()
        if sources and layers:
            # one call: after each, this thread would wait for the Python of others
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [x[:, row, :, :n] for x in layers for row, n in zip(targets, lengths, strict=True)],
                [x[:, row, :, :n] for x in layers for row, n in zip(sources, lengths, strict=True)],
            )
        for states in self._states.values():
            for state in states.values():
                state[targets] = state[sources]

    def save(self, rows: Sequence[int], lengths: Sequence[int]) -> list[SavedRow]:
        """Copy the first tokens of some rows; their states are after all that they have."""
        longest = max(lengths)
        saved = SavedRows(
            {
                n: torch.stack([layer[:, row, :, :longest] for row in rows], 1)
                for n, layer in self._layers.items()
            },
            _each(self._states, lambda state: torch.stack([state[row] for row in rows])),
        )
        return [SavedRow(saved, at, length) for at, length in enumerate(lengths)]

    def put(self, row: int, saved: SavedRow, length: int) -> None:
        """Write the first `length` saved tokens into a row; where there are states, all of them."""
        begin = 0
        for part in saved.parts:
            end = min(begin + part.length, length)
            for layer, old in part.rows.layers.items():
                own = old[:, part.at]
                self.layer(layer, own)
                self._layers[layer][:, row, :, begin:end] = own[:, :, : end - begin]
            begin = end
        mine = slice(saved.at, saved.at + 1)
        for layer, states in _each(saved.rows.states, lambda state: state[mine]).items():
            self.put_states(layer, slice(row, row + 1), states)

    def clear(self) -> None:
        """Release the tensors."""
        self._layers, self._views, self._states, self._shape = {}, {}, {}, (0, 0)


def _each(states: dict[int, State], change: Callable[[Tensor], Tensor]) -> dict[int, State]:
    """Return the states of all layers, each changed."""
    return {
        layer: {name: change(state) for name, state in each.items()}
        for layer, each in states.items()
    }


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
    around: Tensor | None = None
    """[2, B, S] the begin and the end of what a new token sees whole, later tokens too; see
    vision.py. Those are in the same pass."""

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

    def route(self, layer: int, chosen: Tensor) -> Tensor:
        """Record the experts that a router chooses for the new tokens [B * S, K]."""
        if (routing := self.store.routing(chosen.device)) is None:
            return chosen
        recorded = chosen.to(routing.dtype)
        if self.rows is None:
            rows = torch.arange(len(recorded), device=recorded.device)
            routing[rows, layer, self.starts] = recorded
        else:
            new = recorded.view(len(self.starts), self.width, -1)[self.entry, self.offset]
            routing[self.write_row, layer, self.write_at] = new
        return chosen

    def carry(self, call: Call, layer: int, hidden: Tensor) -> Tensor:
        """Call a mixer for the new tokens [B, S, W], from the state that each row has.

        Rows that get the same number of tokens are called together: a state is that of a row's own
        last token then, and never of the padding after it.
        """
        if self.rows is None:
            rows = slice(len(hidden))
            begin = self.store.states(layer, rows)
            if begin is not None and self._begins is not None:
                begin = {name: _cleared(state, self._begins) for name, state in begin.items()}
            out, end = call(hidden, begin)
            self.store.put_states(layer, rows, end)
            return out
        parts = []
        for entries, length, first in self._together:
            begin = None if first else self.store.states(layer, self.rows[entries])
            part, end = call(hidden[entries, :length], begin)
            self.store.put_states(layer, self.rows[entries], end)
            parts.append(part)
        out = parts[0].new_zeros(*hidden.shape[:2], parts[0].shape[2])
        for (entries, length, _), part in zip(self._together, parts, strict=True):
            out[entries, :length] = part
        return out

    @cached_property
    def _begins(self) -> Tensor | None:
        """[B] which rows get their first token; None: none does."""
        first = self.starts == 0
        return first if bool(first.any()) else None

    @cached_property
    def _together(self) -> list[tuple[Tensor, int, bool]]:
        """Entries that get the same number of tokens, that number, and whether they are the first
        ones.
        """
        groups: dict[tuple[int, bool], list[int]] = {}
        both = zip(self.lengths.tolist(), self.starts.tolist(), strict=True)
        for entry, (length, start) in enumerate(both):
            groups.setdefault((length, start == 0), []).append(entry)
        device = self.starts.device
        return [(torch.tensor(e, device=device), *key) for key, e in groups.items()]

    def mask(self, window: int) -> Tensor:
        """Return [B, 1, S, L], true where a new token may attend to a key; see `window_of`."""
        if window not in self._masks:
            keys = torch.arange(self.total, device=self.starts.device)
            behind = self.positions[:, :, None] - keys
            seen = behind >= 0
            if window > 0:
                seen &= behind < window
            elif window:
                seen &= keys // -window == (self.positions // -window)[:, :, None]
            if self.around is not None:
                begin, end = self.around[..., None]
                seen |= (keys >= begin) & (keys < end)
            self._masks[window] = seen[:, None]
        return self._masks[window]


def window_of(module: nn.Module, sliding_window: int | None) -> int:
    """Return how far a layer's queries see: 0: all earlier keys; w > 0: the last w keys, their own
    among them; -c < 0: those of their own chunk, which begins at a multiple of c tokens.
    """
    config: Any = getattr(module, "config", None)
    chunk = getattr(config, "attention_chunk_size", None)
    # a layer's number is asked for only here: a compiler makes a graph for each
    if chunk and config.layer_types[module.layer_idx] == "chunked_attention":
        return -int(chunk)
    return sliding_window or 0


def scaled_by_position(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Correct queries [B, H, S, D] that Llama 4 has scaled by their places in this tensor: return
    them scaled by their positions [B, S] (arXiv:2501.19399).
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    at = torch.arange(query.shape[2], device=query.device)[None]

    def scale(place: Tensor) -> Tensor:
        steps = torch.floor((place.float() + 1.0) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1.0

    return (query * (scale(positions) / scale(at))[:, None, :, None]).to(query.dtype)


def _cleared(state: Tensor, first: Tensor) -> Tensor:
    """Return a copy of states [B, ...] with zeros in the rows whose first token comes now."""
    return state.masked_fill(first.view(-1, *(1 for _ in state.shape[1:])), 0)


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
    width = value.shape[3]
    if width > key.shape[3]:
        raise ValueError(
            f"{type(module).__name__} has values of {width} numbers and keys of {key.shape[3]}: "
            "the embedded engine cannot store them"
        )
    if width < key.shape[3]:  # keys and values lie together, equally wide
        value = F.pad(value, (0, key.shape[3] - width))
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
    mask = rows.mask(window_of(module, sliding_window))
    query = scaled_by_position(module, query, rows.positions)
    out = attend(query, all_keys, all_values, mask=mask, scale=scaling, sinks=s_aux)
    return out[..., :width].transpose(1, 2), None


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

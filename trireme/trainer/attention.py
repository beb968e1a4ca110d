"""Attention: computes attention over a packed micro-batch, by a kernel for its trie of tokens.

- `sdpa`: padded rows of similar size, by a mask or its name. The only one with gradients on a CPU.
- `varlen`: flash attention over rows end to end, without padding and without a mask. A row's
  queries are the last tokens of its path, which is what that kernel calls causal.
- `flex`: queries and keys are the flat tokens themselves, and a block mask encodes which token
  precedes which, so that the keys of shared prefixes are not copied.

Registered with transformers under the name `trireme_packed`, without a mask function of that name,
so that the model builds no mask of its own. The micro-batch comes as the keyword `packed` of the
model's forward; linear layers, norms and experts see each flat token once. Dropout of attention
weights is off: a ratio of probabilities compares one and the same network.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import CausalBias, causal_lower_right
from transformers import AttentionInterface, PreTrainedModel

from trireme.config.lookup import has_sinks
from trireme.engines.torch.rows import attend, refuse_plans, scaled_by_position, window_of
from trireme.engines.torch.vision import vision_of
from trireme.trainer import compiled

logger = logging.getLogger(__name__)

NAME = "trireme_packed"

# Extras that some architectures pass to their attention and this one does not compute.
_UNKNOWN = ("softcap", "position_bias", "cache")

Kernel = Literal["sdpa", "varlen", "flex"]

_SMALLEST = 16  # rows below this many queries or keys share a bucket
_LONG = 512  # queries of a row that is faster without a mask, its short beginning computed again
_MULTIPLE = 128  # queries of aligned rows: a kernel's block
_AGREEMENT = 0.02  # of a trial to float32, relative to the largest number: bfloat16 has 0.004


class Trie(NamedTuple):
    """Flat tokens [T] in an order in which every token precedes what continues it."""

    spans: Sequence[tuple[int, np.ndarray]]
    """The number of keys before each row's first query, and the row's whole path."""
    depth: np.ndarray
    """[T] tokens before each on its path."""
    ends: np.ndarray
    """[T] one past the last token that continues each: j is seen by the queries j to ends[j]."""
    around: np.ndarray | None = None
    """[2, T] the begin and the end, on its path, of a stretch that each token sees whole, later
    tokens too: its picture in some models, nothing elsewhere. None: nothing anywhere. Such a
    stretch is contiguous in the flat tokens."""


class Layout(Protocol):
    """A trie in a kernel's form, on a device."""

    def to(self, device: torch.device) -> Layout:
        """Return the same layout on `device`."""
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window: int,
        scale: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend: query [1, H, T, D], key, value [1, Hkv, T, D] -> [1, T, H, D].

        `window`: which keys of its path a query sees, see `window_of` of rows.py. `sinks` [H]: see
        `attend` there.
        """
        ...


def lay_out(trie: Trie, kernel: Kernel = "sdpa", *, align: bool = False) -> Layout:
    """Lay out a trie for a kernel; `align` is for the rows of `sdpa`."""
    if kernel == "varlen":
        return Paths.of(trie)
    if kernel == "flex":
        around = np.zeros((2, 0), np.int64) if trie.around is None else trie.around
        depth, ends = torch.from_numpy(trie.depth), torch.from_numpy(trie.ends)
        return Blocks(depth, ends, torch.from_numpy(around), torch.device("cpu"))
    return Rows.of(trie, align)


def kernel_for(
    model: PreTrainedModel, path: str | Path, asked: str, device: torch.device, *, half: bool
) -> Kernel:
    """Choose the kernel of a run for a model from the folder `path`: see `choose_kernel`."""
    text, vision = model.config.get_text_config(), vision_of(model)
    heads = text.num_attention_heads
    return choose_kernel(
        asked,
        device,
        half=half,
        heads=heads,
        key_heads=getattr(text, "num_key_value_heads", None) or heads,
        width=getattr(text, "head_dim", None) or text.hidden_size // heads,
        sinks=has_sinks(path),
        around=vision is not None and vision.around,
    )


@cache
def choose_kernel(
    asked: str,
    device: torch.device,
    *,
    half: bool,
    heads: int,
    key_heads: int,
    width: int,
    sinks: bool = False,
    around: bool = False,
) -> Kernel:
    """Choose the kernel of a run and try it on its device. `heads` of `width` share the keys of
    `key_heads`; `around`: tokens of the model see later ones, see `Trie`.

    auto: varlen on a GPU in bfloat16 if it matches SDPA there and the model has no `sinks` and
    nothing `around`, else sdpa. Raises ValueError if the requested kernel does not match.
    """
    plain = device.type == "cpu" or not half or sinks or around
    if asked == "sdpa" or (asked == "auto" and plain):
        return "sdpa"
    kernel: Kernel = "flex" if asked == "flex" else "varlen"
    try:
        gap = _trial(kernel, device, (heads, key_heads, width), sinks, around)
        failure = (
            "" if gap < _AGREEMENT else f"differs from SDPA by {gap:.2g} of the largest number"
        )
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        first_line = str(error).partition("\n")[0]
        failure = f"fails: {first_line or type(error).__name__}"
    if not failure:
        return kernel
    text = f"attention kernel {kernel} on {device} with torch {torch.__version__} {failure}"
    if asked != "auto":
        raise ValueError(f"trainer.attn_implementation: {text}; sdpa works everywhere")
    logger.warning("%s; training continues with sdpa", text)
    return "sdpa"


def _trial(
    kernel: Kernel,
    device: torch.device,
    shape: tuple[int, int, int],
    sinks: bool,
    around: bool,
) -> float:
    """Return the largest relative difference of a small trie's outputs and gradients from SDPA in
    float32.
    """
    heads, key_heads, width = shape
    trunk, branch = np.arange(200), np.concatenate([np.arange(70), np.arange(200, 330)])
    ends = np.where(np.arange(330) < 70, 330, np.where(np.arange(330) < 200, 200, 330))
    depth = np.concatenate([np.arange(200), np.arange(70, 200)])
    seen = np.array([[90], [180]]) * ((depth >= 90) & (depth < 180)) if around else None
    trie = Trie([(0, trunk), (70, branch)], depth, ends, seen)
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    rows = [drawn(1, h, 330, width) for h in (heads, key_heads, key_heads)]
    rows += [drawn(heads)] if sinks else []
    results: list[list[Tensor]] = []
    tried: list[tuple[Kernel, torch.dtype]] = [("sdpa", torch.float32), (kernel, torch.bfloat16)]
    for name, dtype in tried:
        given = [row.bfloat16().to(device, dtype).requires_grad_() for row in rows]
        layout = lay_out(trie, name).to(device)
        out = layout.attend(*given[:3], window=0, scale=None, sinks=given[3] if sinks else None)
        slope = torch.linspace(-1, 1, width, dtype=torch.float32, device=device)
        (out.float() * slope).sum().backward()
        results.append([out.detach(), *(row.grad for row in given if row.grad is not None)])
    gaps = [
        (one - other.float()).abs().max() / one.abs().max()
        for one, other in zip(*results, strict=True)
    ]
    return float(torch.stack(gaps).max())


@dataclass(frozen=True)
class AttentionRows:
    """Attention rows of similar size, padded to one: R rows, Q queries, K keys."""

    queries: Tensor
    """[R, Q] index into the flat tokens; padding repeats the row's last query."""
    keys: Tensor
    """[R, K] index into the flat tokens; padding repeats the row's last key."""
    starts: Tensor
    """[R] keys before the row's first query: query i sees keys 0 to start + i."""
    causal: bool
    """All starts are 0 and Q = K: plain causal attention, no mask needed."""
    named: CausalBias | None = None
    """The mask in the form that kernels know by name, without its numbers; only if all starts are K
    - Q."""
    around: Tensor | None = None
    """[2, R, Q] as in `Trie`; None if nothing."""
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def bias(self, window: int = 0) -> Tensor | None:
        """Return the mask, in its named form if there is one; None if attention is plain causal."""
        if window or self.around is not None:
            return self.mask(window)
        return None if self.causal else self.mask() if self.named is None else self.named

    def mask(self, window: int = 0) -> Tensor:
        """Return [R, 1, Q, K], true where a query sees a key; `window`: see `window_of` of
        rows.py.
        """
        if window not in self._masks:
            last = self.starts[:, None] + torch.arange(
                self.queries.shape[1], device=self.starts.device
            )
            behind = last[:, :, None] - torch.arange(self.keys.shape[1], device=self.starts.device)
            seen = behind >= 0
            if window > 0:
                seen = seen & (behind < window)
            elif window:
                keys = torch.arange(self.keys.shape[1], device=self.starts.device)
                seen = seen & ((last // -window)[:, :, None] == keys // -window)
            if window:
                # Padded queries of a short row may be past the window of every key: keep key 0.
                seen[:, :, 0] |= ~seen.any(-1)
            if self.around is not None:
                keys = torch.arange(self.keys.shape[1], device=self.starts.device)
                begin, end = self.around[..., None]
                seen = seen | ((keys >= begin) & (keys < end))
            self._masks[window] = seen[:, None]
        return self._masks[window]


@dataclass(frozen=True)
class Rows:
    """Padded rows, a bucket of similar sizes at a time, for SDPA."""

    buckets: tuple[AttentionRows, ...]
    place: Tensor
    """[T] index of a flat token's attention output in the buckets' concatenated padded queries."""
    trie: Trie
    """The rows as they are, on the host."""

    @classmethod
    def of(cls, trie: Trie, align: bool) -> Rows:
        """`align`: rows of a bucket begin at the same token, so that none needs a mask."""
        buckets: dict[tuple[int, int, int], list[tuple[int, int, np.ndarray]]] = {}
        for begin, path in trie.spans:
            start = begin if align or len(path) - begin < max(_LONG, 8 * begin) else 0
            first = start if align else start == 0
            key = (first, grid(len(path) - start), grid(len(path)))
            buckets.setdefault(key, []).append((start, begin, path))
        out: list[AttentionRows] = []
        place = np.empty(len(trie.depth), np.int64)
        base = 0
        for _, members in sorted(buckets.items(), key=lambda item: item[0]):
            num_queries = max(len(path) - start for start, _, path in members)
            num_keys = max(len(path) for _, _, path in members)
            if align:
                padded = -(-num_queries // _MULTIPLE) * _MULTIPLE
                num_queries, num_keys = padded, num_keys + padded - num_queries
            queries = np.empty((len(members), num_queries), np.int64)
            keys = np.empty((len(members), num_keys), np.int64)
            for r, (start, begin, path) in enumerate(members):
                tail = path[start:]
                queries[r, : len(tail)], queries[r, len(tail) :] = tail, tail[-1]
                keys[r, : len(path)], keys[r, len(path) :] = path, path[-1]
                place[path[begin:]] = base + r * num_queries + np.arange(begin - start, len(tail))
            base += queries.size
            starts = torch.tensor([start for start, _, _ in members])
            around = None if trie.around is None else trie.around[:, queries]
            if around is None or not around.any():
                named = causal_lower_right(num_queries, num_keys) if align else None
                around = None
            else:
                named, around = None, torch.from_numpy(around)
            indices = torch.from_numpy(queries), torch.from_numpy(keys)
            out.append(AttentionRows(*indices, starts, not members[0][0], named, around))
        return cls(tuple(out), torch.from_numpy(place), trie)

    def to(self, device: torch.device) -> Rows:
        """Move the indices of all buckets to `device`."""
        buckets = tuple(
            AttentionRows(
                r.queries.to(device),
                r.keys.to(device),
                r.starts.to(device),
                r.causal,
                r.named,
                None if r.around is None else r.around.to(device),
            )
            for r in self.buckets
        )
        return Rows(buckets, self.place.to(device), self.trie)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window: int,
        scale: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend bucket by bucket, then return to the order of the flat tokens."""
        query, key, value = _as_autocast(query, key, value)
        flat_query, flat_key, flat_value = (_flat(x) for x in (query, key, value))
        outputs = []
        for rows in self.buckets:
            bias = rows.bias(window)
            attended = attend(
                _take(flat_query, rows.queries, query.shape[1]),
                _take(flat_key, rows.keys, key.shape[1]),
                _take(flat_value, rows.keys, value.shape[1]),
                mask=bias,
                causal=bias is None,
                scale=scale,
                sinks=sinks,
            )
            outputs.append(attended.transpose(1, 2).reshape(rows.queries.numel(), -1))
        out = select(torch.cat(outputs) if len(outputs) > 1 else outputs[0], self.place)
        return out.view(1, len(self.place), query.shape[1], -1)


@dataclass(frozen=True)
class Paths:
    """Concatenated rows, R of them, for `torch.nn.attention.varlen`. Queries are the flat
    tokens.
    """

    keys: Tensor | None
    """[sum of paths] index into the flat tokens; None: no prefix is shared, so they are the flat
    tokens."""
    query_starts: Tensor
    """[R + 1] the start of each row's queries, and the end."""
    key_starts: Tensor
    """[R + 1] the same for its keys."""
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, trie: Trie) -> Paths:
        """Rows are in the order of the flat tokens. Raises NotImplementedError for tokens that see
        later ones.
        """
        if trie.around is not None:
            raise NotImplementedError("it has no tokens that see later ones")
        queries = [len(path) - start for start, path in trie.spans]
        keys = [len(path) for _, path in trie.spans]
        index = torch.from_numpy(np.concatenate([path for _, path in trie.spans]))
        first, second = (torch.tensor([0, *n]).cumsum(0).int() for n in (queries, keys))
        return cls(None if queries == keys else index, first, second, max(queries), max(keys))

    def to(self, device: torch.device) -> Paths:
        """Move the indices to `device`."""
        keys = None if self.keys is None else self.keys.to(device)
        starts = self.query_starts.to(device), self.key_starts.to(device)
        return Paths(keys, *starts, self.most_queries, self.most_keys)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window: int,
        scale: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend by flash attention over rows end to end."""
        if sinks is not None:
            raise NotImplementedError(
                "it cannot compute attention sinks: torch gives no gradient of its log-sum-exp"
            )
        if window < 0:
            raise NotImplementedError("it has no chunks of attention")
        query, key, value = _as_autocast(query, key, value)
        options = {"scale": scale} | _varlen_options(window, query.shape[1] != key.shape[1])
        rows = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
        if self.keys is not None:
            rows[1:] = (select(_flat(x), self.keys).view(-1, *x.shape[1::2]) for x in (key, value))
        spans = self.query_starts, self.key_starts, self.most_queries, self.most_keys
        return _varlen()(*rows, *spans, **options).unsqueeze(0)


@cache
def _varlen() -> Any:
    """Return the kernel. Raises ImportError if torch is older than it."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _varlen_options(window: int, grouped: bool) -> dict[str, Any]:
    """Return options for causal attention, a window and grouped heads, as the installed torch names
    them.

    Raises NotImplementedError if its kernel has no window.
    """
    known = inspect.signature(_varlen()).parameters
    options: dict[str, Any] = {"enable_gqa": grouped} if "enable_gqa" in known else {}
    if "window_size" in known:  # keys before the query's own, and after it
        return options | {"window_size": (window - 1 if window else -1, 0)}
    if window:
        raise NotImplementedError("varlen_attn of this torch has no sliding windows")
    return options | {"is_causal": True}


@dataclass(frozen=True)
class Blocks:
    """Flat tokens with a block mask of visible keys, for FlexAttention."""

    depth: Tensor
    """[T] as in `Trie`."""
    ends: Tensor
    """[T] as in `Trie`."""
    around: Tensor
    """[2, T] as in `Trie`; [2, 0]: none."""
    device: torch.device
    """The device that uses the masks; they are made on the host."""
    _masks: dict[int, flex.BlockMask] = field(default_factory=dict)

    def to(self, device: torch.device) -> Blocks:
        """Take `device` for the masks."""
        return Blocks(self.depth, self.ends, self.around, device)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window: int,
        scale: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend by FlexAttention, with one block mask for each window."""
        query, key, value = _as_autocast(query, key, value)
        if window not in self._masks:
            self._masks[window] = self.mask(window)
        grouped = query.shape[1] != key.shape[1]
        options = {"block_mask": self._masks[window], "scale": scale, "enable_gqa": grouped}
        attended = _flex(query.device.type)
        if sinks is None:
            return attended(query, key, value, **options).transpose(1, 2)
        # The softmax without sinks is that with them times exp(lse) / (exp(lse) + exp(sink)).
        out, aux = attended(query, key, value, **options, return_aux=flex.AuxRequest(lse=True))
        share = torch.sigmoid(aux.lse - sinks[:, None])
        return (out * share[..., None].to(out.dtype)).transpose(1, 2)

    def mask(self, window: int = 0) -> flex.BlockMask:
        """Make the block mask: blocks seen whole, blocks seen in part, and the visible keys in
        these.
        """
        depth, ends = self.depth.to(self.device), self.ends.to(self.device)
        first, last = self._flat_around().to(self.device)

        def earlier(query: Tensor, key: Tensor) -> Tensor:
            seen = (key <= query) & (query < ends[key])
            if window < 0:
                return seen & (depth[query] // -window == depth[key] // -window)
            return seen & (depth[query] - depth[key] < window) if window else seen

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = earlier(query, key)
            return seen | ((key >= first[query]) & (key < last[query])) if len(first) else seen

        some, whole = _blocks(self.depth.numpy(), self.ends.numpy(), window)
        some |= _between(self._flat_around().numpy(), len(some))
        tables = [_table(blocks, self.device) for blocks in (some & ~whole, whole)]
        length = len(self.ends)
        return flex.BlockMask.from_kv_blocks(
            *tables[0], *tables[1], _MULTIPLE, sees, seq_lengths=(length, length)
        )

    def _flat_around(self) -> Tensor:
        """Return `around` as places in the flat tokens."""
        places = torch.arange(self.around.shape[1])
        return self.around + torch.where(self.around[1] > 0, places - self.depth[: len(places)], 0)


def _between(around: np.ndarray, count: int) -> np.ndarray:
    """Return [B, B] for blocks of queries and keys: some key may be in a query's stretch, of which
    `around` [2, T] has the begin and the end in the flat tokens.
    """
    near = np.zeros((count, count), bool)
    for at in np.flatnonzero(around[1]):
        first, last = around[:, at]
        near[at // _MULTIPLE, first // _MULTIPLE : (last - 1) // _MULTIPLE + 1] = True
    return near


def _blocks(depth: np.ndarray, ends: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return [B, B] for blocks of queries and keys: some key may be visible, and all
    certainly are.
    """
    starts = np.arange(0, len(ends), _MULTIPLE)
    number = np.arange(len(starts))
    earlier, same = number[:, None] > number, number[:, None] == number
    some = same | (earlier & (np.maximum.reduceat(ends, starts) > starts[:, None]))
    whole = earlier & (np.minimum.reduceat(ends, starts) >= starts[:, None] + _MULTIPLE)
    if window < 0:
        chunks = depth // -window
        low, high = np.minimum.reduceat(chunks, starts), np.maximum.reduceat(chunks, starts)
        some &= same | ((low[:, None] <= high) & (low <= high[:, None]))
        whole &= (low[:, None] == high) & (low == high[:, None])
    elif window:
        low, high = np.minimum.reduceat(depth, starts), np.maximum.reduceat(depth, starts)
        some &= same | (low[:, None] - high < window)
        whole &= high[:, None] - low < window
    return some, whole


def _table(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return [1, 1, B] the number of key blocks of each query block, and [1, 1, B, B] their indices
    first.
    """
    counts = blocks.sum(1).astype(np.int32)[None, None]
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)[None, None]
    return torch.from_numpy(counts).to(device), torch.from_numpy(order).to(device)


@cache
def _flex(kind: str) -> Any:
    """Return FlexAttention; uncompiled, which stores all scores, only on a CPU."""
    attention = flex.flex_attention
    return attention if kind == "cpu" else torch.compile(attention, dynamic=True)


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for SDPA, except if the mask is a named one. Rotary embeddings and
    norms leave queries and keys in float32, but not values.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def grid(length: int) -> int:
    """Round up to a bucket's length: lengths in it differ by a factor of at most 1.5 or so."""
    size = _SMALLEST
    while size < length:
        size += size // 2
    return size


def _flat(x: Tensor) -> Tensor:
    """Flatten [1, H, T, D] -> [T, H * D]."""
    return x.squeeze(0).transpose(0, 1).reshape(x.shape[2], -1)


def _take(flat: Tensor, index: Tensor, heads: int) -> Tensor:
    """Take rows [R, L] of flat tokens [T, H * D] -> [R, H, L, D]."""
    taken = select(flat, index.reshape(-1))
    return taken.view(*index.shape, heads, -1).transpose(1, 2)


def select(flat: Tensor, index: Tensor) -> Tensor:
    """Return flat[index] of rows or numbers; on a CPU by functions whose backward is several times
    faster there.

    On a GPU that backward adds rounded numbers in any order; that of an index sorts them first.
    """
    if flat.is_cuda:
        return flat[index]
    if flat.ndim == 1:
        return flat.index_select(0, index)
    return flat.gather(0, index[:, None].expand(-1, flat.shape[1]))


class HasLayout(Protocol):
    """A packed micro-batch."""

    @property
    def attention(self) -> Layout:
        """The layout of attention, in the kernel's form."""
        ...

    @property
    def positions(self) -> Tensor:
        """[T] the number of tokens before each on its path."""
        ...

    @property
    def handle(self) -> Tensor:
        """The handle of that layout, for blocks that are compiled."""
        ...


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    packed: HasLayout | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attend: query [1, H, T, D], key, value [1, Hkv, T, D] of flat tokens -> ([1, T, H,
    D], None). `s_aux` [H]: sinks.
    """
    if packed is None:
        raise ValueError("a model with packed attention is called through trainer.model only")
    for name in _UNKNOWN:
        if extras.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} wants '{name}' in its attention: not supported"
            )
    window = window_of(module, sliding_window)
    options: dict[str, Any] = {"window": window, "scale": scaling, "sinks": s_aux}
    query = scaled_by_position(module, query, packed.positions[None])
    if torch.compiler.is_compiling():
        inputs = _as_autocast(query, key, value)
        return compiled.attend(packed.handle, *inputs, **options), None
    return packed.attention.attend(query, key, value, **options), None


def register() -> None:
    """Make `attn_implementation="trireme_packed"` known to transformers; further calls do
    nothing.
    """
    AttentionInterface.register(NAME, packed_attention)
    refuse_plans()

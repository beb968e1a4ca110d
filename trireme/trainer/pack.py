"""Pack: lays samples out so that a token prefix shared by several is computed once.

The samples of a micro-batch are sorted by their token ids. Neighbours then share the longest
prefixes, and together they form a trie: the flat tokens [T] are its nodes. Equal rollouts, rollouts
of one prompt and steps that extend one another all fall out of it. Layout only, the loss stays what
it is: every trained token of every sample is still an entry of its own.

Invariants:
- every flat token is a query in exactly one attention row; a row's keys are the whole path from the
  root to its last query;
- the queries of a row are contiguous in the flat tokens and are the last tokens of its path;
- tokens after the last one that predicts anything are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from trireme.batch import Batch

_SMALLEST = 16  # rows below this many queries or keys are not told apart
_MULTIPLE = 128  # queries of aligned rows: a kernel's block


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
    """Where all starts are K - Q: the mask by its name, which kernels know, without its numbers."""
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def bias(self, window: int = 0) -> Tensor | None:
        """None where attention is plain causal; else the mask, by its name where it has one."""
        if self.causal and not window:
            return None
        return self.mask(window) if window or self.named is None else self.named

    def mask(self, window: int = 0) -> Tensor:
        """[R, 1, Q, K] true where a query sees a key; `window` > 0: the last so many keys only."""
        if window not in self._masks:
            last = self.starts[:, None] + torch.arange(
                self.queries.shape[1], device=self.starts.device
            )
            behind = last[:, :, None] - torch.arange(self.keys.shape[1], device=self.starts.device)
            seen = behind >= 0
            if window:
                # Padded queries of a short row may lie past the window of every key: keep key 0.
                seen = seen & (behind < window)
                seen[:, :, 0] |= ~seen.any(-1)
            self._masks[window] = seen[:, None]
        return self._masks[window]


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch as the model computes it."""

    tokens: Tensor
    """[T] flat token ids, each computed once."""
    positions: Tensor
    """[T] how many tokens come before each on its path."""
    rows: tuple[AttentionRows, ...]
    place: Tensor
    """[T] where a flat token's attention output lies in the rows' padded queries, end to end."""
    predecessors: Tensor
    """[M] flat index of the token that predicts each entry of the batch."""

    def to(self, device: torch.device) -> PackedBatch:
        """The same layout on a device."""
        return PackedBatch(
            self.tokens.to(device),
            self.positions.to(device),
            tuple(
                AttentionRows(
                    r.queries.to(device),
                    r.keys.to(device),
                    r.starts.to(device),
                    r.causal,
                    r.named,
                )
                for r in self.rows
            ),
            self.place.to(device),
            self.predecessors.to(device),
        )


def pack(batch: Batch, *, share_prefix: bool = True, align: bool = False) -> PackedBatch:
    """The layout of a batch that has at least one entry.

    `align`, for a GPU: rows side by side begin at the same token, so that none needs a mask, and
    have multiples of 128 queries. More rows are alone; a CPU attends with a mask as fast.
    """
    inputs = _inputs(batch)
    order, shared = _sorted(inputs, share_prefix)
    paths: list[np.ndarray] = [np.empty(0, np.int64)] * len(inputs)
    spans: list[tuple[int, int]] = []  # (keys before the first query, sample) of each row
    tokens: list[np.ndarray] = []
    total = 0
    before = np.empty(0, np.int64)
    for n, common in zip(order, shared, strict=True):
        new = len(inputs[n]) - common
        path = np.concatenate([before[:common], np.arange(total, total + new)])
        if new:
            if common and common == len(before):
                spans[-1] = (spans[-1][0], n)  # extends the row before it: still plain causal
            else:
                spans.append((common, n))
            tokens.append(inputs[n][common:])
        paths[n] = before = path
        total += new
    rows, place = _rows([(start, paths[n]) for start, n in spans], total, align)
    depth = np.empty(total, np.int64)
    for path in (paths[n] for _, n in spans):
        depth[path] = np.arange(len(path))
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in paths])[:-1]])
    flat_paths = np.concatenate(paths)
    predecessors = flat_paths[offsets[batch.sample_ids.numpy()] + batch.positions.numpy() - 1]
    return PackedBatch(
        tokens=torch.from_numpy(np.concatenate(tokens)),
        positions=torch.from_numpy(depth),
        rows=rows,
        place=torch.from_numpy(place),
        predecessors=torch.from_numpy(predecessors),
    )


def pack_on(device: torch.device, batch: Batch, *, share_prefix: bool = True) -> PackedBatch:
    """`pack` as the device wants it, and there."""
    return pack(batch, share_prefix=share_prefix, align=device.type == "cuda").to(device)


def cut(batch: Batch, max_tokens: int, *, share_prefix: bool = True) -> Iterator[Batch]:
    """Micro-batches of at most `max_tokens` computed tokens (a longer sample stays alone).

    A group goes into one micro-batch where it fits, and the two samples of a pair always. Samples
    without an entry are left out.
    """
    inputs = _inputs(batch)
    paired = "pair_ids" in batch.fields
    order, shared = _sorted(inputs, share_prefix and not paired)  # as given: pairs are neighbours
    sizes = [len(inputs[n]) for n in order]
    added = [size - common for size, common in zip(sizes, shared, strict=True)]
    chosen: list[int] = []
    room = max_tokens
    for begin, end in _neighbours(batch, order):
        # A group's samples share their prompt: what it costs alone is the first one whole.
        whole = sizes[begin] + sum(added[begin + 1 : end])
        fits = paired or whole <= max_tokens
        if chosen and room < whole - sizes[begin] + added[begin] and fits:
            yield batch.select(sorted(chosen))
            chosen, room = [], max_tokens
        for at in range(begin, end):
            if not sizes[at]:
                continue
            new = added[at] if chosen else sizes[at]
            if chosen and new > room and not paired:
                yield batch.select(sorted(chosen))
                chosen, room, new = [], max_tokens, sizes[at]
            chosen.append(order[at])
            room -= new
    if chosen:
        yield batch.select(sorted(chosen))


def packed_tokens(batch: Batch, *, share_prefix: bool = True) -> int:
    """How many tokens the model computes where the whole batch is one micro-batch."""
    inputs = _inputs(batch)
    _, shared = _sorted(inputs, share_prefix)
    return sum(len(row) for row in inputs) - sum(shared)


def _inputs(batch: Batch) -> list[np.ndarray]:
    """Of each sample the tokens that the model must read: up to the last that predicts an entry."""
    ends = np.cumsum(batch.counts)
    positions = batch.positions.numpy()
    return [
        row[: positions[end - 1] if count else 0]
        for row, end, count in zip(batch.tokens, ends, batch.counts, strict=True)
    ]


def _sorted(inputs: Sequence[np.ndarray], share: bool) -> tuple[list[int], list[int]]:
    """Samples in order of their ids, and how many tokens each shares with the one before."""
    if not share:
        return list(range(len(inputs))), [0] * len(inputs)
    # Big-endian bytes compare like the ids they hold.
    keys = [row.astype(">u4").tobytes() for row in inputs]
    order = sorted(range(len(inputs)), key=keys.__getitem__)
    shared = [0]
    for a, b in pairwise(order):
        n = min(len(inputs[a]), len(inputs[b]))
        differ = (inputs[a][:n] != inputs[b][:n]).nonzero()[0]
        shared.append(int(differ[0]) if len(differ) else n)
    return order, shared[: len(order)]


def _neighbours(batch: Batch, order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches [begin, end) of the order that belong to one group."""
    begin = 0
    for at in range(1, len(order) + 1):
        if at == len(order) or batch.groups[order[at]] != batch.groups[order[begin]]:
            yield begin, at
            begin = at


def _rows(
    spans: Sequence[tuple[int, np.ndarray]], total: int, align: bool
) -> tuple[tuple[AttentionRows, ...], np.ndarray]:
    """Rows in padded buckets, and each flat token's place among their queries."""
    buckets: dict[tuple[int, int, int], list[tuple[int, np.ndarray]]] = {}
    for start, path in spans:
        first = start if align else start == 0
        key = (first, _grid(len(path) - start), _grid(len(path)))
        buckets.setdefault(key, []).append((start, path))
    out: list[AttentionRows] = []
    place = np.empty(total, np.int64)
    base = 0
    for _, members in sorted(buckets.items(), key=lambda item: item[0]):
        num_queries = max(len(path) - start for start, path in members)
        num_keys = max(len(path) for _, path in members)
        if align:
            padded = -(-num_queries // _MULTIPLE) * _MULTIPLE
            num_queries, num_keys = padded, num_keys + padded - num_queries
        queries = np.empty((len(members), num_queries), np.int64)
        keys = np.empty((len(members), num_keys), np.int64)
        for r, (start, path) in enumerate(members):
            tail = path[start:]
            queries[r, : len(tail)], queries[r, len(tail) :] = tail, tail[-1]
            keys[r, : len(path)], keys[r, len(path) :] = path, path[-1]
            place[tail] = base + r * num_queries + np.arange(len(tail))
        base += queries.size
        starts = torch.tensor([start for start, _ in members])
        whole = not members[0][0]
        named = causal_lower_right(num_queries, num_keys) if align else None
        out.append(
            AttentionRows(torch.from_numpy(queries), torch.from_numpy(keys), starts, whole, named)
        )
    return tuple(out), place


def _grid(length: int) -> int:
    """Lengths of one bucket: within a factor of 1.5 or so of each other."""
    size = _SMALLEST
    while size < length:
        size += size // 2
    return size

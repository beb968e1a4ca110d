"""Pack: lays samples out so that a token prefix shared by several is computed once.

The samples of a micro-batch are sorted by their token ids. Neighbours then share the longest
prefixes, and together they form a trie: the flat tokens [T] are its nodes. This covers equal
rollouts, rollouts of one prompt and steps that extend one another. Only the layout changes, not the
loss: every trained token of every sample is still a separate entry.

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
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trireme.batch import Batch
from trireme.engines.request import checked_ids
from trireme.engines.torch.recurrent import is_recurrent
from trireme.engines.torch.routing import RoutingShape
from trireme.engines.torch.vision import Vision, around, axes, seeing, vision_of
from trireme.pictures import BEGIN, Pictures, shown
from trireme.trainer.attention import Kernel, Layout, Trie, lay_out
from trireme.trainer.compiled import handle_of
from trireme.trainer.nodes import Nodes


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch in the form that the model computes."""

    tokens: Tensor
    """[T] flat token ids, each computed once."""
    positions: Tensor
    """[T] the number of tokens before each on its path."""
    attention: Layout
    """The layout of attention, in the kernel's form."""
    predecessors: Tensor
    """[M] flat index of the token that predicts each entry of the batch."""
    nodes: Nodes | None = None
    """The same tokens for layers with a state; None for a model that has none."""
    rotary: Tensor | None = None
    """[A, T] the positions that rotary embeddings get where there are pictures; None: those above.
    """
    pictures: Pictures = field(default_factory=dict)
    """The pictures that `tokens` have ids of."""
    routed_experts: Tensor | None = None
    """[T, L, K] the experts that compute each token, by those routers that replay them; see
    Experience."""
    handle: Tensor = field(default_factory=Tensor)
    """The handle of `attention`, for blocks that are compiled. Callers omit it; FSDP, which casts a
    block's inputs, makes copies with a value for each field."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", handle_of(self.attention))

    def inputs(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the tokens, and their positions, as the language model of `model` takes them."""
        vision = seeing(model) if self.pictures else vision_of(model)
        places = self.positions[None] if self.rotary is None else axes(self.rotary[:, None])
        if vision is None or not (self.pictures or vision.learns):
            return {"input_ids": self.tokens[None], "position_ids": places}
        return {**vision.inputs(self.tokens[None], self.pictures), "position_ids": places}

    def route(self, layer: int, chosen: Tensor) -> Tensor:
        """Return the recorded experts [T, K] of a layer; `chosen` for tokens without a record."""
        if self.routed_experts is None:
            return chosen
        recorded = self.routed_experts[:, layer]
        known = recorded[:, :1] != torch.iinfo(recorded.dtype).max
        return torch.where(known, recorded.to(chosen.dtype), chosen)

    def to(self, device: torch.device) -> PackedBatch:
        """Return the same micro-batch on `device`."""
        return PackedBatch(
            self.tokens.to(device),
            self.positions.to(device),
            self.attention.to(device),
            self.predecessors.to(device),
            None if self.nodes is None else self.nodes.to(device),
            None if self.rotary is None else self.rotary.to(device),
            self.pictures,
            None if self.routed_experts is None else self.routed_experts.to(device),
        )


def pack(
    batch: Batch,
    *,
    share_prefix: bool = True,
    align: bool = False,
    kernel: Kernel = "sdpa",
    nodes: bool = False,
    vision: Vision | None = None,
) -> PackedBatch:
    """Lay out a batch that has at least one entry; `nodes`: for a model whose layers have a state;
    `vision`: of a model that sees the batch's pictures.

    `align`, for a GPU: rows of a bucket begin at the same token, so that none needs a mask, and
    have multiples of 128 queries. This leaves more rows alone; a CPU attends with a mask as fast.
    """
    inputs = _inputs(batch)
    order, shared = _sorted(_compared(batch, inputs), share_prefix)
    paths: list[np.ndarray] = [np.empty(0, np.int64)] * len(inputs)
    spans: list[tuple[int, int]] = []  # (keys before the first query, sample) of each row
    tokens: list[np.ndarray] = []
    routing = _Routing.of(batch)
    total = 0
    before = np.empty(0, np.int64)
    ends = np.empty(sum(map(len, inputs)), np.int64)
    for n, common in zip(order, shared, strict=True):
        new = len(inputs[n]) - common
        ends[before[common:]] = total  # no later token continues these
        path = np.concatenate([before[:common], np.arange(total, total + new)])
        if new:
            if common and common == len(before):
                spans[-1] = (spans[-1][0], n)  # extends the row before it: still plain causal
            else:
                spans.append((common, n))
            tokens.append(inputs[n][common:])
            if routing is not None:
                routing.add(n, common, len(inputs[n]))
        paths[n] = before = path
        total += new
    ends[before] = total
    depth = np.empty(total, np.int64)
    for _, n in spans:
        depth[paths[n]] = np.arange(len(paths[n]))
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in paths])[:-1]])
    flat_paths = np.concatenate(paths)
    predecessors = flat_paths[offsets[batch.sample_ids.numpy()] + batch.positions.numpy() - 1]
    flat = np.concatenate(tokens)
    pictures = shown(flat[flat >= BEGIN].tolist(), batch.pictures)
    rotary = seen = None
    if pictures and vision is not None:
        for path, sample in zip(paths, inputs, strict=True):
            places = vision.positions(sample.tolist(), pictures)
            if rotary is None:
                rotary = places.new_empty(len(places), total)
            rotary[:, torch.from_numpy(path)] = places
            if vision.around:
                seen = np.zeros((2, total), np.int64) if seen is None else seen
                seen[:, path] = around(sample)
    trie = Trie([(start, paths[n]) for start, n in spans], depth, ends[:total], seen)
    return PackedBatch(
        tokens=torch.from_numpy(flat),
        positions=torch.from_numpy(depth),
        attention=lay_out(trie, kernel, align=align),
        predecessors=torch.from_numpy(predecessors),
        nodes=Nodes.of(trie) if nodes else None,
        rotary=rotary,
        pictures=pictures,
        routed_experts=None if routing is None else routing.flat(),
    )


def pack_for(
    model: PreTrainedModel,
    device: torch.device,
    batch: Batch,
    *,
    share_prefix: bool = True,
    kernel: Kernel = "sdpa",
) -> PackedBatch:
    """Return `pack` in the form that a model needs on a device, and on it. The model must have the
    ids.
    """
    align, nodes = device.type == "cuda", is_recurrent(model.config)
    return pack(
        batch,
        share_prefix=share_prefix,
        align=align,
        kernel=kernel,
        nodes=nodes,
        vision=seeing(model) if batch.pictures else None,
    ).to(device)


def refuse_unknown_ids(batch: Batch, vocabulary: int) -> None:
    """Raise ValueError, naming the experience, for an id that is neither the vocabulary's nor a
    picture's. A workflow's own experiences and recorded ones can have any.
    """
    flat = np.concatenate([np.empty(0, np.int64), *batch.tokens])
    if not (((flat >= vocabulary) & (flat < BEGIN)) | (flat < 0)).any():
        return
    for eid, row, count in zip(batch.eids, batch.tokens, batch.counts, strict=True):
        if count:
            checked_ids(row.tolist(), vocabulary, f"experience {eid}", pictures=batch.pictures)


def refuse_other_experts(batch: Batch, routing: RoutingShape | None) -> None:
    """Raise ValueError, naming the experience, for recorded experts that are not those of the
    model: their number in a layer, their layers, or an expert that it does not have.
    """
    if routing is None or not batch.routed_experts:
        return
    for eid, row in zip(batch.eids, batch.routed_experts, strict=True):
        if row is None:
            continue
        what = ""
        if row.shape[1:] != (routing.layers, routing.chosen):
            what = f"of {list(row.shape[1:])} layers and experts"
        else:
            known = row[..., :1] != np.iinfo(row.dtype).max
            wrong = np.argwhere(known & ((row < 0) | (row >= routing.experts)))
            if len(wrong):
                what = f"with the expert {row[tuple(wrong[0])]} at token {wrong[0][0]}"
        if what:
            raise ValueError(
                f"experience {eid} has routed_experts {what}: expected those of this model, "
                f"{[routing.layers, routing.chosen]} with experts from 0 to {routing.experts - 1}, "
                "since algorithm.enable_router_replay computes tokens by them"
            )


def cut(batch: Batch, max_tokens: int, *, share_prefix: bool = True) -> Iterator[Batch]:
    """Yield micro-batches of at most `max_tokens` computed tokens (a longer sample is alone).

    A group goes into one micro-batch if it fits, and the two samples of a pair always. Samples
    without an entry are left out.
    """
    inputs = _inputs(batch)
    paired = "pair_ids" in batch.fields
    # as given: pairs are neighbours
    order, shared = _sorted(_compared(batch, inputs), share_prefix and not paired)
    sizes = [len(inputs[n]) for n in order]
    added = [size - common for size, common in zip(sizes, shared, strict=True)]
    chosen: list[int] = []
    room = max_tokens
    for begin, end in _neighbours(batch, order):
        # A group's samples share their prompt: its cost alone is that of the first sample whole.
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
    """Return the number of tokens that the model computes if the whole batch is one micro-batch."""
    inputs = _inputs(batch)
    _, shared = _sorted(_compared(batch, inputs), share_prefix)
    return sum(len(row) for row in inputs) - sum(shared)


def _inputs(batch: Batch) -> list[np.ndarray]:
    """Return the tokens of each sample that the model must read: up to the last that predicts an
    entry.
    """
    ends = np.cumsum(batch.counts)
    positions = batch.positions.numpy()
    return [
        row[: positions[end - 1] if count else 0]
        for row, end, count in zip(batch.tokens, ends, batch.counts, strict=True)
    ]


class _Routing:
    """The experts of the flat tokens."""

    def __init__(self, rows: Sequence[np.ndarray | None], like: np.ndarray) -> None:
        self._rows, self._like = rows, like
        self._parts: list[np.ndarray] = []

    @classmethod
    def of(cls, batch: Batch) -> _Routing | None:
        """Return those of a batch, still empty; None if none are recorded."""
        like = next((row for row in batch.routed_experts if row is not None), None)
        return None if like is None else cls(batch.routed_experts, like)

    def of_sample(self, sample: int, begin: int, end: int) -> np.ndarray:
        """Return those of some tokens of a sample; of one without them all are unknown."""
        row = self._rows[sample]
        if row is not None:
            return row[begin:end]
        shape = (end - begin, *self._like.shape[1:])
        return np.full(shape, np.iinfo(self._like.dtype).max, self._like.dtype)

    def add(self, sample: int, begin: int, end: int) -> None:
        """Append tokens of a sample to the flat ones."""
        self._parts.append(self.of_sample(sample, begin, end))

    def flat(self) -> Tensor:
        """Return the experts [T, L, K] of the flat tokens."""
        return torch.from_numpy(np.concatenate(self._parts))


def _compared(batch: Batch, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Return the numbers by which tokens are compared: their ids, or, where experts are recorded,
    a number for each token and its experts, since other experts make another token of it.
    """
    routing = _Routing.of(batch)
    if routing is None:
        return inputs
    numbers: dict[bytes, int] = {}
    out = []
    for sample, ids in enumerate(inputs):
        experts = routing.of_sample(sample, 0, len(ids)).reshape(len(ids), -1)
        rows = np.concatenate(
            [np.ascontiguousarray(part).view(np.uint8) for part in (ids[:, None], experts)], 1
        )
        keys = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0].tolist()
        each = (numbers.setdefault(key, len(numbers)) for key in keys)
        out.append(np.fromiter(each, np.int64, len(keys)))
    return out


def _sorted(inputs: Sequence[np.ndarray], share: bool) -> tuple[list[int], list[int]]:
    """Sort samples by their ids; also return the number of tokens that each shares with the one
    before.
    """
    if not share:
        return list(range(len(inputs))), [0] * len(inputs)
    # Big-endian bytes compare like the ids themselves; pictures' ids need eight.
    wide = any(len(row) and row.max() >= BEGIN for row in inputs)
    keys = [row.astype(">u8" if wide else ">u4").tobytes() for row in inputs]
    order = sorted(range(len(inputs)), key=keys.__getitem__)
    shared = [0]
    for a, b in pairwise(order):
        n = min(len(inputs[a]), len(inputs[b]))
        differ = (inputs[a][:n] != inputs[b][:n]).nonzero()[0]
        shared.append(int(differ[0]) if len(differ) else n)
    return order, shared[: len(order)]


def _neighbours(batch: Batch, order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges [begin, end) of the order that belong to one group, or to one pair."""
    groups: Sequence[object] = batch.groups
    if "pair_ids" in batch.fields:  # those of one task may be more than fit
        pairs = dict(zip(batch.sample_ids.tolist(), batch.fields["pair_ids"].tolist(), strict=True))
        groups = [pairs.get(n) for n in range(batch.num_samples)]
    begin = 0
    for at in range(1, len(order) + 1):
        if at == len(order) or groups[order[at]] != groups[order[begin]]:
            yield begin, at
            begin = at

"""Nodes: the stretches between the branches of a packed micro-batch, for layers with a state.

A layer of engines/torch/recurrent.py computes tokens in their order, from the state that the tokens
before them have left. In a trie of tokens every stretch that nothing branches from, a *node*,
begins with the state at its parent's end. Nodes that others continue are called level by level,
those of one length together, so that the state at their end is exact; all others come last, padded
after their end to similar lengths. No token is computed twice, and gradients flow through the
states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trireme.engines.torch.recurrent import Call, State
from trireme.trainer.attention import Trie, grid, select


@dataclass(frozen=True)
class NodeCall:
    """Nodes that a mixer computes together."""

    tokens: Tensor
    """[N, S] flat index of the tokens of each node, its last one again after its end."""
    parents: Tensor | None
    """[N] the place of each parent among the continued nodes; None: these have none."""
    continued: bool
    """Whether other nodes begin with the states at their ends; they have no padding then."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a micro-batch, in the order in which they are called."""

    calls: tuple[NodeCall, ...]
    place: Tensor
    """[T] index of a flat token's output in the concatenated outputs of the calls."""

    @classmethod
    def of(cls, trie: Trie) -> Nodes:
        """Cut a trie into nodes."""
        stretches, parents = _stretches(trie)
        level = np.zeros(len(stretches), np.int64)
        continued = np.zeros(len(stretches), bool)
        for number, parent in enumerate(parents):
            if parent >= 0:
                level[number] = level[parent] + 1
                continued[parent] = True
        groups: dict[tuple[bool, int, bool, int], list[int]] = {}
        for number, (begin, end) in enumerate(stretches):
            inner = bool(continued[number])
            length = end - begin if inner else grid(end - begin)
            key = (not inner, int(level[number]) if inner else 0, parents[number] < 0, length)
            groups.setdefault(key, []).append(number)
        calls: list[NodeCall] = []
        place = np.empty(len(trie.depth), np.int64)
        among: dict[int, int] = {}  # a continued node's place among those that were called
        base = 0
        for (last, _, first, _), members in sorted(groups.items()):
            width = max(stretches[n][1] - stretches[n][0] for n in members)
            tokens = np.empty((len(members), width), np.int64)
            for row, number in enumerate(members):
                begin, end = stretches[number]
                tokens[row, : end - begin] = np.arange(begin, end)
                tokens[row, end - begin :] = end - 1
                place[begin:end] = base + row * width + np.arange(end - begin)
            above = None if first else torch.tensor([among[parents[n]] for n in members])
            calls.append(NodeCall(torch.from_numpy(tokens), above, not last))
            if not last:
                among |= {number: len(among) + row for row, number in enumerate(members)}
            base += tokens.size
        return cls(tuple(calls), torch.from_numpy(place))

    def to(self, device: torch.device) -> Nodes:
        """Move the indices to `device`."""
        calls = tuple(
            NodeCall(
                one.tokens.to(device),
                None if one.parents is None else one.parents.to(device),
                one.continued,
            )
            for one in self.calls
        )
        return Nodes(calls, self.place.to(device))

    def carry(self, call: Call, layer: int, hidden: Tensor) -> Tensor:
        """Call a mixer for all nodes: hidden states [1, T, W] -> its output [1, T, W]."""
        flat = hidden[0]
        outputs: list[Tensor] = []
        ends: State = {}  # of all continued nodes so far
        for one in self.calls:
            begin = None
            if one.parents is not None:
                begin = {name: state[one.parents] for name, state in ends.items()}
            shape = *one.tokens.shape, flat.shape[1]
            out, end = call(select(flat, one.tokens.reshape(-1)).view(shape), begin)
            outputs.append(out.reshape(one.tokens.numel(), -1))
            if one.continued:
                ends = {n: torch.cat([ends[n], end[n]]) if ends else end[n] for n in end}
        return select(torch.cat(outputs), self.place)[None]


def _stretches(trie: Trie) -> tuple[Sequence[tuple[int, int]], list[int]]:
    """Return the flat tokens [begin, end) of every node, in their order, and its parent's number
    (-1: none).
    """
    above: dict[int, int] = {}  # first token of a row -> the token that it continues
    cuts = {len(trie.depth)}
    for start, path in trie.spans:
        first = int(path[start])
        cuts.add(first)
        if start:
            above[first] = int(path[start - 1])
            cuts.add(above[first] + 1)
    stretches = [*pairwise(sorted(cuts))]
    ending = {end - 1: number for number, (_, end) in enumerate(stretches)}
    roots = {int(path[0]) for start, path in trie.spans if not start}
    parents = [
        -1 if begin in roots else ending[above.get(begin, begin - 1)] for begin, _ in stretches
    ]
    return stretches, parents

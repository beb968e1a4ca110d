"""Head: log-probabilities and entropies of entries from hidden states, without all logits at once.

Logits are computed in chunks of tokens. The backward pass goes through blocks of the vocabulary,
whose rows of the weight's gradient are then complete; it recomputes their logits, unless all of
them were few enough to be stored. Entries that follow the same token at the same temperature (equal
rollouts) share theirs. What is summed over blocks or chunks is summed in float32, whatever the
weight's dtype: in bfloat16 each addition would lose small terms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trireme.config.memory import LOGIT_NUMBERS, STORED_LOGITS
from trireme.engines.torch.linear import QuickLinear, linear, transposed_product
from trireme.trainer.attention import select


class Scale(NamedTuple):
    """The scaling of logits that a few architectures have: z -> cap tanh(factor z / cap)."""

    factor: float
    cap: float | None

    def of(self, raw: Tensor) -> Tensor:
        """Return float32 logits, or float64, from the head's product."""
        logits = raw.float() if raw.dtype in (torch.bfloat16, torch.float16) else raw
        if self.factor != 1.0:
            logits = logits * self.factor
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return d logits / d raw, as a function of the logits."""
        return self.factor * (1 - (logits / self.cap).square()) if self.cap else self.factor


class _Chunk(NamedTuple):
    nodes: slice
    """The chunk's range of the nodes that logits are computed for."""
    entries: slice
    """The range of the entries of these nodes, entries being sorted by node."""
    at: Tensor
    """[E] the node of each entry, relative to the chunk."""


def score_entries(
    model: PreTrainedModel,
    hidden: Tensor,
    predecessors: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute what `token_logprobs` returns; `predecessors` [M] index the entries' tokens in
    `hidden`.
    """
    # a token and the bits of its temperature in one number, so that equal pairs are found together
    keys = predecessors << 32 | temperatures.float().view(torch.int32).long()
    unique_keys, node_of = keys.unique(return_inverse=True)
    order = node_of.argsort(stable=True)
    heat = (unique_keys & 0xFFFFFFFF).int().view(torch.float32)
    head = model.get_output_embeddings()
    assert head is not None
    size = LOGIT_NUMBERS[hidden.device.type] // model.config.get_text_config().vocab_size
    ordered = node_of.index_select(0, order)
    chunks = list(_chunks(len(unique_keys), ordered, max(size, 1)))
    nodes, scale = select(hidden, unique_keys >> 32), _scale(model)
    targets = targets.index_select(0, order)
    plain = type(head) in (nn.Linear, QuickLinear)
    if not torch.is_grad_enabled():
        weight = head.weight.to(_dtype_of(head.weight)) if plain else None
        parts = []
        for c in chunks:
            few = nodes[c.nodes]
            raw = head(few) if weight is None else _product(few, weight, head.bias)
            parts.append(_score(scale.of(raw), heat, targets, c, 1 + 2 * entropy))
        rows = torch.cat(parts, dim=1)
    elif plain:
        inputs = nodes, head.weight, head.bias, heat, targets, ordered, chunks
        rows = torch.stack(_LinearHead.apply(*inputs, scale, entropy))
    else:  # for example, with an adapter
        rows = torch.cat([_again(head, nodes, heat, targets, c, scale, entropy) for c in chunks], 1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    rows = torch.stack([select(row, back) for row in rows])
    return rows[0], rows[1:] if entropy else None


def _scale(model: PreTrainedModel) -> Scale:
    config = model.config
    factor = getattr(config, "logit_scale", None) or 1.0
    factor /= getattr(config, "logits_scaling", None) or 1.0
    return Scale(factor, getattr(config, "final_logit_softcapping", None))


def _chunks(num_nodes: int, node_of: Tensor, size: int) -> Iterator[_Chunk]:
    """Yield chunks of `size` nodes each; `node_of` [M] is sorted."""
    starts = torch.arange(0, num_nodes + size, size, device=node_of.device)
    bounds = torch.searchsorted(node_of, starts).tolist()
    for n, (begin, end) in enumerate(pairwise(bounds)):
        nodes, entries = slice(n * size, (n + 1) * size), slice(begin, end)
        yield _Chunk(nodes, entries, node_of[entries] - n * size)


def _score(logits: Tensor, heat: Tensor, targets: Tensor, chunk: _Chunk, num: int) -> Tensor:
    """Return the first `num` numbers [num, E] of a chunk's entries: log p, the entropy, and the
    mean of p (H + log p) over the vocabulary.
    """
    logits = _cooled(logits, heat[chunk.nodes])
    return _of_entries(logits, _of_nodes(logits, num), targets, chunk)


def _cooled(logits: Tensor, heat: Tensor) -> Tensor:
    """Divide logits [N, V] by the temperatures [N]."""
    return logits if _is_one(heat) else logits / heat[:, None]


def _of_nodes(logits: Tensor, num: int) -> Tensor:
    """Return the first `num` numbers [num, N] of rows of logits: the logarithm of the sum of their
    exponentials, the entropy, and the mean of p (H + log p).
    """
    log_sums = logits.logsumexp(-1)
    rows = [log_sums]
    if num > 1:
        p = logits.softmax(-1)
        rows.append(log_sums - (p * logits).sum(-1))
    if num > 2:
        rows.append((p.square() * ((rows[1] - log_sums)[:, None] + logits)).sum(-1))
    return torch.stack(rows)


def _of_entries(logits: Tensor, rows: Tensor, targets: Tensor, chunk: _Chunk) -> Tensor:
    """Return the numbers of a chunk's entries: log p in place of the sum's logarithm."""
    index = chunk.at * logits.shape[1] + targets[chunk.entries]
    out = rows[:, chunk.at]
    return torch.cat([(logits.reshape(-1)[index] - out[0])[None], out[1:]])


def _is_one(heat: Tensor) -> bool:
    """Return whether temperatures divide nothing: a pass over logits takes time on a CPU. A GPU
    would have to be waited for, and divides.
    """
    return heat.device.type == "cpu" and bool((heat == 1).all())


def _again(
    head: nn.Module,
    nodes: Tensor,
    heat: Tensor,
    targets: Tensor,
    chunk: _Chunk,
    scale: Scale,
    entropy: bool,
) -> Tensor:
    """Compute `_score` of a chunk by any head, recomputed in the backward pass."""

    def score(states: Tensor) -> Tensor:
        return _score(scale.of(head(states)), heat, targets, chunk, 1 + entropy)

    return checkpoint(score, nodes[chunk.nodes], use_reentrant=False)


def _dtype_of(weight: Tensor) -> torch.dtype:
    """Return the dtype of the head's factors: autocast's, or the weight's own."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _product(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply states [N, D] by weight [V, D], plus bias: [N, V], without gradients. Logits of
    16-bit factors are float32: rounded to bfloat16, those from 16 on would be 0.125 apart.
    """
    states = states.to(weight.dtype)
    bias = None if bias is None else bias.to(weight.dtype)
    if weight.dtype not in _HALF:
        return linear(states, weight, bias)
    with torch.autocast(weight.device.type, enabled=False):
        if weight.device.type == "cpu":
            raw = F.linear(states.float(), weight.float())
        elif _MM_WIDENS:
            raw = torch.mm(states, weight.t(), out_dtype=torch.float32)
        else:
            raw = F.linear(states, weight).float()
        return raw if bias is None else raw + bias.float()


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [N, V], b [N, D] -> a' b [V, D], as `_product` does."""
    return _product(a.t(), b.t(), None) if a.dtype in _HALF else transposed_product(a, b)


_HALF = torch.bfloat16, torch.float16
_MM_WIDENS = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 8)
"""Whether torch's product can have a wider result than its factors, on a GPU."""


class _LinearHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        nodes: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        heat: Tensor,
        targets: Tensor,
        node_of: Tensor,
        chunks: list[_Chunk],
        scale: Scale,
        entropy: bool,
    ) -> tuple[Tensor, ...]:
        """Compute nodes [N, D], weight [V, D], heat [N], targets [M], node_of [M] -> [M], and [M]
        again.
        """
        ctx.dtype, ctx.scale = _dtype_of(weight), scale
        cast, rows, parts, stored = weight.to(ctx.dtype), [], [], []
        stores = len(nodes) * len(weight) <= STORED_LOGITS[nodes.device.type]
        for c in chunks:
            raw = _product(nodes[c.nodes], cast, bias)
            logits = _cooled(scale.of(raw), heat[c.nodes])
            rows.append(_of_nodes(logits, 1 + entropy))
            parts.append(_of_entries(logits, rows[-1], targets, c))
            if stores:
                stored.append(raw)
        of_nodes = torch.cat(rows, dim=1)
        ctx.save_for_backward(nodes, weight, bias, heat, targets, node_of, of_nodes, *stored)
        return tuple(torch.cat(parts, dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients by the logits: (one-hot - p) / heat for log p, -p (log p + H) / heat for
        the entropy.
        """
        nodes, weight, bias, heat, targets, node_of, of_nodes, *stored = ctx.saved_tensors
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_nodes = torch.zeros_like(nodes, dtype=torch.promote_types(nodes.dtype, wide))
        d_weight = weight.new_empty(weight.shape, dtype=wide) if ctx.needs_input_grad[1] else None
        d_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=wide)
        most = LOGIT_NUMBERS[nodes.device.type]
        height = len(nodes) if stored else min(len(nodes), isqrt(most))
        width = max(most // height, 1)
        for c in _chunks(len(nodes), node_of, height):
            states = nodes[c.nodes].to(ctx.dtype)
            numbers = heat[c.nodes], of_nodes[:, c.nodes], [g[c.entries] for g in gradients]
            for at in range(0, len(weight), width):
                block = slice(at, at + width)
                cast = weight[block].to(ctx.dtype)
                if len(stored) == 1:
                    raw = stored[0][:, block]
                elif stored:
                    raw = torch.cat([chunk[:, block] for chunk in stored])
                else:
                    raw = _product(states, cast, None if bias is None else bias[block])
                d_raw = _gradient(raw, *numbers, c.at, targets[c.entries] - at, ctx.scale)
                if d_bias is not None:
                    d_bias[block] += d_raw.sum(0)
                d_raw = d_raw.to(ctx.dtype)
                d_nodes[c.nodes] += _product(d_raw, cast.t(), None)
                if d_weight is not None:
                    part = _transposed_product(d_raw, states)
                    d_weight[block] = part if c.nodes.start == 0 else d_weight[block] + part
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
        return d_nodes.to(nodes.dtype), d_weight, d_bias, *[None] * 6


def _gradient(
    raw: Tensor,
    heat: Tensor,
    of_nodes: Tensor,
    of_entries: list[Tensor],
    at: Tensor,
    targets: Tensor,
    scale: Scale,
) -> Tensor:
    """Return the gradient by the head's product raw [N, B] with a block of the vocabulary, from the
    nodes' numbers and the gradients by their entries' numbers. The entries' nodes are `at`; their
    `targets` are relative to the block, and some outside of it.
    """
    logits = scale.of(raw)
    log_p = _cooled(logits, heat) - of_nodes[0][:, None]
    sums = [torch.zeros_like(heat, dtype=g.dtype).index_add_(0, at, g) for g in of_entries]
    if len(sums) == 1:
        out = log_p.exp_().mul_(-sums[0][:, None])  # each of these is as large as the logits
    else:
        p = log_p.exp()
        log_p.add_(of_nodes[1][:, None]).mul_(sums[1][:, None])
        out = log_p.add_(sums[0][:, None]).mul_(p).neg_()
    here = (targets >= 0) & (targets < logits.shape[1])
    index = at * logits.shape[1] + targets.where(here, 0)
    out.view(-1).index_add_(0, index, of_entries[0].where(here, 0))
    if not _is_one(heat):
        out.div_(heat[:, None])
    slope = scale.slope(logits)
    return out if isinstance(slope, float) and slope == 1 else out.mul_(slope)

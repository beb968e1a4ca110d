"""Head: log-probabilities and entropies of entries from hidden states, without all logits at once.

Logits are computed in chunks, and recomputed in the backward pass, so that no [M, V] tensor
outlives its chunk; if one chunk is enough they are stored. Entries that follow the same token at
the same temperature (equal rollouts) share theirs. The gradient of the head's weight is summed over
the chunks in float32, whatever the weight's dtype: in bfloat16 each addition would lose small
terms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trireme.config.memory import LOGIT_NUMBERS
from trireme.engines.sampling import log_probabilities
from trireme.engines.torch.linear import QuickLinear, linear, transposed_product
from trireme.trainer.attention import select

_BLOCK = 1 << 13
"""Rows of the head's gradient that are computed together: all at once would double its memory."""


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
    chunks = list(_chunks(len(unique_keys), node_of[order], max(size, 1)))
    nodes, targets, scale = select(hidden, unique_keys >> 32), targets[order], _scale(model)
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
        inputs = nodes, head.weight, head.bias, heat, targets, chunks, scale, entropy
        rows = torch.stack(_LinearHead.apply(*inputs))
    else:  # for example, with an adapter
        rows = torch.cat([_again(head, nodes, heat, targets, c, scale, entropy) for c in chunks], 1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    rows = rows[:, back]
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
    if not _is_one(some := heat[chunk.nodes]):
        logits = logits / some[:, None]
    log_sums = logits.logsumexp(-1)
    index = chunk.at * logits.shape[1] + targets[chunk.entries]
    logprobs = logits.reshape(-1)[index] - log_sums[chunk.at]
    if num == 1:
        return logprobs[None]
    p = logits.softmax(-1)
    entropies = log_sums - (p * logits).sum(-1)
    rows = [entropies]
    if num == 3:
        rows.append((p.square() * ((entropies - log_sums)[:, None] + logits)).sum(-1))
    return torch.stack([logprobs, *(row[chunk.at] for row in rows)])


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
        chunks: list[_Chunk],
        scale: Scale,
        entropy: bool,
    ) -> tuple[Tensor, ...]:
        """Compute nodes [N, D], weight [V, D], heat [N], targets [M] -> [M], and [M] again."""
        ctx.dtype = _dtype_of(weight)
        ctx.chunks, ctx.scale, ctx.entropy = chunks, scale, entropy
        cast, num, parts, raw = weight.to(ctx.dtype), 1 + entropy, [], None
        for c in chunks:
            raw = _product(nodes[c.nodes], cast, bias)
            parts.append(_score(scale.of(raw), heat, targets, c, num))
        kept = raw if len(chunks) == 1 else None
        ctx.save_for_backward(nodes, weight, bias, heat, targets, kept)
        return tuple(torch.cat(parts, dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients by the logits: (one-hot - p) / heat for log p, -p (log p + H) / heat for
        the entropy.
        """
        nodes, weight, bias, heat, targets, kept = ctx.saved_tensors
        cast = weight.to(ctx.dtype)
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_nodes = torch.empty_like(nodes)
        d_weight = weight.new_zeros(weight.shape, dtype=wide) if ctx.needs_input_grad[1] else None
        d_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=wide)
        for c in ctx.chunks:
            states = nodes[c.nodes].to(ctx.dtype)
            raw = _product(states, cast, bias) if kept is None else kept
            logits = ctx.scale.of(raw)
            d_logits = _gradient(logits, heat[c.nodes], c, targets, gradients, ctx.entropy)
            slope = ctx.scale.slope(logits)
            d_raw = d_logits if isinstance(slope, float) and slope == 1 else d_logits.mul_(slope)
            if d_bias is not None:
                d_bias += d_raw.sum(0)
            d_raw = d_raw.to(ctx.dtype)
            d_nodes[c.nodes] = linear(d_raw, cast.T)
            if d_weight is not None:
                for at in range(0, len(d_weight), _BLOCK):
                    some = d_raw[:, at : at + _BLOCK]
                    if ctx.dtype in _HALF:
                        d_weight[at : at + _BLOCK] += _product(some.t(), states.t(), None)
                    else:
                        d_weight[at : at + _BLOCK] += transposed_product(some, states)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
        return d_nodes, d_weight, d_bias, None, None, None, None, None


def _gradient(
    logits: Tensor,
    heat: Tensor,
    chunk: _Chunk,
    targets: Tensor,
    gradients: tuple[Tensor, ...],
    entropy: bool,
) -> Tensor:
    """Return the gradient by a chunk's logits [N, V], from the gradients by its entries'
    numbers.
    """
    one = _is_one(heat)
    log_p = log_probabilities(logits if one else logits / heat[:, None])
    p = log_p.exp() if entropy else log_p.exp_()  # each of these is as large as the logits
    of_logprobs = gradients[0][chunk.entries]
    summed = torch.zeros_like(heat, dtype=p.dtype).index_add_(0, chunk.at, of_logprobs)
    out = p * -summed[:, None] if entropy else p.mul_(-summed[:, None])
    at = chunk.at * logits.shape[1] + targets[chunk.entries]
    out.view(-1).index_add_(0, at, of_logprobs)
    if entropy:
        of_entropies = torch.zeros_like(summed).index_add_(0, chunk.at, gradients[1][chunk.entries])
        entropies = -(p * log_p).sum(-1)
        out -= log_p.add_(entropies[:, None]).mul_(p).mul_(of_entropies[:, None])
    return out if one else out.div_(heat[:, None])

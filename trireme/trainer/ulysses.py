"""Ulysses: several ranks share one micro-batch, each a slice of its tokens (arXiv:2309.14509).

Everything except attention works on a rank's own slice of the flat tokens. Around attention an
all-to-all exchanges slices of tokens for slices of heads: there a rank sees all tokens of its
heads, so that the packed layout, shared prefixes included, is computed as in one process.

Invariants:
- ranks of a group get the same micro-batch and call the same collectives, in the backward pass too;
- each entry's log-probability is computed by one rank, whose slice holds its predecessor; all ranks
  get all of them and compute the same loss, of which each takes back its own entries' gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from trireme.engines.torch.composite import text_model
from trireme.engines.torch.recurrent import is_recurrent
from trireme.trainer.attention import packed_attention
from trireme.trainer.pack import PackedBatch
from trireme.trainer.ranks import SequenceGroup

NAME = "trireme_ulysses"


def switch(model: PreTrainedModel, sequence: SequenceGroup) -> None:
    """Make a model attend over several ranks. Raises ValueError if its number of heads,
    or a layer with a state, forbids it.
    """
    if is_recurrent(model.config):
        raise ValueError(
            f"trainer.ulysses_sequence_parallel_size is {sequence.size}: expected 1, since layers "
            "of this model have a state, which passes from token to token"
        )
    if getattr(model.config.get_text_config(), "attn_temperature_tuning", False):
        raise ValueError(
            f"trainer.ulysses_sequence_parallel_size is {sequence.size}: expected 1, since layers "
            "of this model scale queries by their places in a rank's own tokens"
        )
    heads = model.config.get_text_config().num_attention_heads
    if heads % sequence.size:
        raise ValueError(
            f"trainer.ulysses_sequence_parallel_size is {sequence.size}: expected a divisor of the "
            f"model's {heads} attention heads"
        )
    AttentionInterface.register(NAME, ulysses_attention)
    model.set_attn_implementation(NAME)


def sliced(
    model: PreTrainedModel,
    layout: PackedBatch,
    sequence: SequenceGroup,
    compute: Callable[[Tensor, Tensor, Tensor], list[Tensor]],
) -> list[Tensor]:
    """Return `compute`'s numbers of all entries [M], on every rank of the group.

    The layout is on this rank's device. `compute(hidden, at, chosen)` returns those of some
    entries: `chosen` are their indices, `at` the positions of the tokens before them in the hidden
    states of this rank's slice.
    """
    if layout.pictures:
        raise ValueError(
            "trainer.ulysses_sequence_parallel_size: a sample shows a picture, and sequences with "
            "pictures are not divided among ranks: expected 1"
        )
    length = -(-len(layout.tokens) // sequence.size)
    padding = length * sequence.size - len(layout.tokens)
    begin = sequence.rank * length
    my_slice = slice(begin, begin + length)
    packed = layout
    if (experts := layout.routed_experts) is not None:
        unknown = torch.iinfo(experts.dtype).max
        padded = F.pad(experts, (0, 0, 0, 0, 0, padding), value=unknown)
        packed = replace(layout, routed_experts=padded[my_slice])
    hidden = text_model(model)(
        input_ids=F.pad(layout.tokens, (0, padding))[None, my_slice],
        position_ids=F.pad(layout.positions, (0, padding))[None, my_slice],
        use_cache=False,
        packed=packed,
        sequence=sequence,
    ).last_hidden_state[0]
    owners = layout.predecessors // length
    mine = (owners == sequence.rank).nonzero().squeeze(1)
    # A rank without an entry computes one anyway: the head needs a gradient on every rank.
    chosen = mine if len(mine) else mine.new_zeros(1)
    at = (layout.predecessors[chosen] - begin).clamp(0, length - 1)
    order = owners.argsort(stable=True)
    counts = owners.bincount(minlength=sequence.size).tolist()

    def everywhere(values: Tensor) -> Tensor:
        gathered = _Gather.apply(values[: len(mine)], counts, sequence)
        return torch.empty_like(gathered).index_copy(0, order, gathered)

    return [everywhere(values) for values in compute(hidden, at, chosen)]


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence: SequenceGroup,
    packed: PackedBatch,
    s_aux: Tensor | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attend: query [1, H, T/s, D], key, value [1, Hkv, T/s, D] of a slice -> ([1, T/s, H, D],
    None). `s_aux` [H]: sinks, of which each rank takes those of its heads.
    """
    repeats = head_repeats(query.shape[1], key.shape[1], sequence.size)
    num_tokens = len(packed.tokens)

    def whole(x: Tensor) -> Tensor:
        # The padding after the last token attends to nothing.
        return _Exchange.apply(x, sequence)[:, :, :num_tokens]

    key, value = _repeat(key, repeats), _repeat(value, repeats)
    rows = whole(query), whole(key), whole(value)
    sinks = None if s_aux is None else s_aux.chunk(sequence.size)[sequence.rank]
    out, _ = packed_attention(module, *rows, attention_mask, packed=packed, s_aux=sinks, **extras)
    out = F.pad(out, (0, 0, 0, 0, 0, query.shape[2] * sequence.size - num_tokens))
    # Back with the roles of tokens and heads exchanged.
    return _Exchange.apply(out, sequence), None


def head_repeats(heads: int, key_heads: int, size: int) -> int:
    """Return the number of copies of each key-value head with which every rank gets whole heads."""
    group = heads // key_heads
    return next(r for r in range(1, group + 1) if group % r == 0 and key_heads * r % size == 0)


def _repeat(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times, dim=1) if times > 1 else x


class _Exchange(torch.autograd.Function):
    """The all-to-all, and in the backward pass its reverse.

    [1, A, B/s, D] -> [1, A/s, B, D]: all of the second axis, for one part of the first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: SequenceGroup) -> Tensor:
        ctx.sequence = sequence
        return _swap(x, sequence)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return [1, A/s, B, D] -> [1, A, B/s, D], which is the same with A and B exchanged."""
        back = _swap(gradient.transpose(1, 2), ctx.sequence)
        return back.transpose(1, 2), None


def _swap(x: Tensor, sequence: SequenceGroup) -> Tensor:
    _, first, second, depth = x.shape
    sent = x[0].reshape(sequence.size, first // sequence.size, second, depth).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=sequence.group)
    return received.transpose(0, 1).reshape(1, first // sequence.size, -1, depth)


class _Gather(torch.autograd.Function):
    """Concatenates every rank's values; their gradient is equal on all, and each takes its own
    part.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, counts: list[int], sequence: SequenceGroup) -> Tensor:
        """Gather own [counts[rank]] -> [sum of counts]."""
        ctx.counts, ctx.rank = counts, sequence.rank
        longest = max(counts)
        rows = [mine.new_empty(longest) for _ in counts]
        padded = F.pad(mine.detach(), (0, longest - len(mine))).contiguous()
        dist.all_gather(rows, padded, group=sequence.group)
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.split(ctx.counts)[ctx.rank], None, None

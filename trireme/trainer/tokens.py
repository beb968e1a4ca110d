"""Tokens: what a train step adds to a batch before its loss: rewards of tokens, pairs, experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trireme.batch import Batch
from trireme.experience import EID, Experience


def token_rewards(experiences: Sequence[Experience], batch: Batch, *, asked_by: str) -> Tensor:
    """The reward of each entry [M]: the workflow's own, else the scalar one on the last entry.

    A reward on a token that is not trained goes to the last trained one before it.
    """
    rows: list[Tensor] = []
    for e, count in zip(experiences, batch.counts.tolist(), strict=True):
        own = torch.zeros(count)
        if not count:
            continue
        if e.token_rewards is not None:
            mask = e.mask.clone()
            mask[0] = False
            place = mask.long().cumsum(0) - 1
            own.index_add_(0, place[place >= 0], e.token_rewards[place >= 0])
        elif e.reward is None:
            raise ValueError(
                f"{asked_by} asks for rewards, and experience {e.eid.uid} has none: its workflow "
                "must set one"
            )
        else:
            own[-1] = e.reward
        rows.append(own)
    return torch.cat(rows)


def split_pairs(experiences: Sequence[Experience]) -> list[Experience]:
    """Of each pair the chosen reply and behind it the rejected one, both after the prompt.

    A pair's `tokens` are the prompt. Raises ValueError for an experience that is none.
    """
    out: list[Experience] = []
    for e in experiences:
        if e.chosen is None or e.rejected is None:
            raise ValueError(
                f"experience {e.eid.uid} is no pair: it needs `chosen` and `rejected` replies"
            )
        for run, reply in enumerate((e.chosen, e.rejected)):
            out.append(
                Experience(
                    torch.cat([e.tokens, reply]),
                    prompt_length=len(e.tokens),
                    temperature=e.temperature,
                    eid=EID(e.eid.batch, e.eid.task, run, e.eid.step, e.eid.suffix),
                )
            )
    return out


def with_pairs(batch: Batch) -> Batch:
    """`pair_ids` and `chosen` [M] of a batch whose samples are `split_pairs`."""
    return batch.with_fields(pair_ids=batch.sample_ids // 2, chosen=batch.sample_ids % 2 == 0)


def with_experts(batch: Batch, experiences: Sequence[Experience]) -> Batch:
    """`expert` [M]: which entries are an expert's (`info["is_expert"]`)."""
    flags = torch.tensor([bool(e.info.get("is_expert")) for e in experiences])
    return batch.with_fields(expert=flags[batch.sample_ids])

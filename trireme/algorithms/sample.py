"""Sample: chooses the experiences of the next train step: order, staleness, an expert's share.

Functions `(buffer, num, version, auxiliary, step, *, options)`, awaited, that return the
experiences and metrics; each declares those of the five that it needs. `version` is that of the
newest weights the engine has, `auxiliary` are the stores of
`buffer.trainer_input.auxiliary_buffers`, `step` is the number of the train step. `warmup` is an old
name of `default`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import torch
from annotated_types import Ge

from trireme.experience import Experience

Sample = tuple[list[Experience], dict[str, float]]


class Takes(Protocol):
    """The methods of a buffer that a strategy needs."""

    async def take(self, n: int, *, oldest: float = 0) -> list[Experience]:
        """Return n experiences, and those of groups older than the version `oldest` that it passed
        over for good; fewer only if these are the last. Raises EOFError after these.
        """
        ...

    async def take_step(self) -> list[Experience]:
        """Return all experiences of the next explore step."""
        ...


def takes_once(strategy: Any) -> Any:
    """Mark a strategy that calls a buffer once: a cancelled take has taken nothing."""
    strategy.takes_once = True
    return strategy


@takes_once
async def default(buffer: Takes, num: int) -> Sample:
    """The next `num` in the buffer's own order."""
    return await buffer.take(num), {}


@takes_once
async def explore_step(buffer: Takes) -> Sample:
    """All experiences of one explore step, however many: on-policy where episodes differ."""
    return await buffer.take_step(), {}


@takes_once
async def staleness_control(
    buffer: Takes, num: int, version: int, *, max_staleness: Annotated[float, Ge(0)] = math.inf
) -> Sample:
    """`num` experiences at most `max_staleness` versions old; older ones are dropped and counted.

    A group is as old as its oldest sampled token, and stays or goes as a whole, wherever a batch
    begins. What no weights sampled is never stale.
    """
    oldest = version - max_staleness
    kept: list[Experience] = []
    stale: list[Experience] = []
    while not kept:  # if the last ones are all stale, the next take reports the end
        try:
            taken = await buffer.take(num, oldest=oldest)
        except EOFError as end:
            if stale:  # no train step has them in its metrics
                end.add_note(
                    f"the last {len(stale)} experiences ({len({e.eid.tid for e in stale})} groups) "
                    f"were not trained: they were more than max_staleness ({max_staleness:g}) "
                    "versions old"
                )
            raise
        for experience in taken:
            (stale if experience.is_older(oldest) else kept).append(experience)
    return kept, {
        "sample/dropped_stale": float(len(stale)),
        "sample/dropped_stale_groups": float(len({e.eid.tid for e in stale})),
    }


async def mix(
    buffer: Takes,
    num: int,
    auxiliary: Mapping[str, Takes],
    *,
    expert_data_ratio: float = 0.5,
    sft_dataset_name: str = "sft_dataset",
) -> Sample:
    """`num` experiences, ceil(ratio num) of them an expert's from an auxiliary buffer.

    An expert's has reward and advantages 0, and `info["is_expert"]`.
    """
    if sft_dataset_name not in auxiliary:
        raise ValueError(
            f"algorithm.sample_strategy 'mix' reads buffer.trainer_input.auxiliary_buffers."
            f"{sft_dataset_name}, which is not given"
        )
    share = own_share(num, expert_data_ratio)
    fresh = await buffer.take(share)
    experts = await auxiliary[sft_dataset_name].take(num - share)
    for expert in experts:
        nothing = torch.zeros(len(expert.tokens), dtype=torch.float32)
        expert.info["is_expert"] = True
        expert.reward = 0.0
        expert.logprobs, expert.advantages, expert.returns = nothing, nothing, nothing
        expert.versions = torch.full((len(expert.tokens),), -1, dtype=torch.int32)
    return [*fresh, *experts], {"sample/expert_count": float(len(experts))}


def own_share(num: int, expert_data_ratio: float) -> int:
    """Return how many of `num` experiences are not an expert's."""
    if not 0 < expert_data_ratio < 1:
        raise ValueError(
            f"algorithm.sample_strategy_args.expert_data_ratio is {expert_data_ratio:g}: expected "
            "more than 0 and less than 1"
        )
    return num - math.ceil(expert_data_ratio * num)


def representative_sample(experiences: Sequence[Experience]) -> list[dict[str, Any]]:
    """Return prompt, reply and reward of the worst and the best experience."""
    ranked = sorted((e for e in experiences if e.reward is not None), key=lambda e: e.reward or 0.0)
    shown = [ranked[0], ranked[-1]] if ranked else list(experiences[:1])
    return [
        {"prompt": e.prompt_text, "response": e.response_text, "reward": e.reward} for e in shown
    ]

"""Advantage: how much better each rollout did than its group.

Functions `(rewards [N], groups [N], *, options) -> advantages [N]`; NaN says: leave this one out of
training. Further arguments that a function may name: `runs` and `steps` [N], the numbers in the
eid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor


def by_group(groups: Tensor) -> Iterator[Tensor]:
    """The members of each group, a bool [N] at a time, in the order of the group numbers."""
    for number in groups.unique():
        yield groups == number


def grpo(
    rewards: Tensor,
    groups: Tensor,
    *,
    epsilon: float = 1e-6,
    std_threshold: float | None = None,
    std_cal_level: Literal["group", "batch"] = "group",
) -> Tensor:
    """A = (R - mean) / (std + epsilon) over the group (DeepSeekMath, arXiv:2402.03300).

    std is the sample's (n - 1). A group of one has mean 0 and std 1. With `std_threshold`, groups
    whose std is not above it, and groups of one, are left out. `std_cal_level: batch` divides by
    the std of all rewards of the batch instead (arXiv:2508.08221).
    """
    if std_cal_level not in ("group", "batch"):
        raise ValueError(
            f"algorithm.advantage_fn_args.std_cal_level is '{std_cal_level}': 'group' or 'batch'"
        )
    advantages = torch.empty_like(rewards)
    batch_std = rewards.std() if len(rewards) > 1 else rewards.new_ones(())
    for member in by_group(groups):
        own = rewards[member]
        alone = len(own) == 1
        mean = rewards.new_zeros(()) if alone else own.mean()
        std = rewards.new_ones(()) if alone else own.std()
        if std_threshold is not None and (alone or std <= std_threshold):
            advantages[member] = torch.nan
            continue
        scale = batch_std if std_cal_level == "batch" else std
        advantages[member] = (own - mean) / (scale + epsilon)
    return advantages

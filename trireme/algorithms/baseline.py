"""Baseline: group-relative advantages that take a baseline off the reward and divide by nothing.

See advantage.py for the functions' form. A run that left several experiences with one reward
counts once in its group's mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from trireme.algorithms.advantage import by_group, counted


def reinforce(rewards: Tensor) -> Tensor:
    """A = R (REINFORCE, Williams 1992)."""
    return rewards.clone()


def rloo(rewards: Tensor, groups: Tensor, runs: Tensor | None = None) -> Tensor:
    """A = (R - mean) n / (n - 1): R less the mean of the others (RLOO, arXiv:2402.14740).

    A group of one has A = R.
    """

    def score(member: Tensor, own: Tensor) -> Tensor:
        n = len(own)
        return member if n == 1 else (member - own.mean()) * n / (n - 1)

    return _each_group(rewards, groups, runs, score)


def opmd(
    rewards: Tensor,
    groups: Tensor,
    runs: Tensor | None = None,
    *,
    opmd_baseline: Literal["mean", "logavgexp"] = "mean",
    tau: float = 1.0,
) -> Tensor:
    """A = R - b, b the mean or tau log mean exp(R / tau) (OPMD, arXiv:2505.17826).

    A group of one has b = 0.
    """
    if opmd_baseline not in ("mean", "logavgexp"):
        raise ValueError(
            f"algorithm.advantage_fn_args.opmd_baseline is '{opmd_baseline}': 'mean' or 'logavgexp'"
        )
    if opmd_baseline == "logavgexp" and tau <= 0:
        raise ValueError(f"algorithm.advantage_fn_args.tau is {tau:g}: expected more than 0")

    def score(member: Tensor, own: Tensor) -> Tensor:
        if len(own) == 1:
            return member
        if opmd_baseline == "mean":
            return member - own.mean()
        return member - tau * ((own / tau).logsumexp(0) - math.log(len(own)))

    return _each_group(rewards, groups, runs, score)


def asymre(
    rewards: Tensor, groups: Tensor, runs: Tensor | None = None, *, baseline_shift: float = -0.1
) -> Tensor:
    """A = R - (mean + shift): below the mean, failures weigh less (AsymRE, arXiv:2506.20520).

    A group of one has a baseline of 0.
    """

    def score(member: Tensor, own: Tensor) -> Tensor:
        return member if len(own) == 1 else member - (own.mean() + baseline_shift)

    return _each_group(rewards, groups, runs, score)


def rec(
    rewards: Tensor,
    groups: Tensor,
    runs: Tensor | None = None,
    *,
    epsilon: float = 1e-6,
    std_normalize: bool = False,
    drop: Literal["balance"] | None = None,
) -> Tensor:
    """A = R - mean, over the population's std + epsilon where asked (REC, arXiv:2509.24203).

    `drop: balance` gives A = 0 to as many below-mean rollouts, drawn at random, as there are more
    of them than above-mean ones. A group of one has A = 0: there is nothing to compare it with.
    """
    if drop not in (None, "balance"):
        raise ValueError(f"algorithm.advantage_fn_args.drop is '{drop}': 'balance' or none")
    # The rollouts of a task are exchangeable: the same draw for every batch is as random as any.
    draws = torch.Generator().manual_seed(0)

    def score(member: Tensor, own: Tensor) -> Tensor:
        out = member - own.mean()
        if std_normalize:
            out = out / (own.std(correction=0) + epsilon)
        if drop == "balance":
            below = (out < 0).nonzero().flatten()
            surplus = max(len(below) - int((out > 0).sum()), 0)
            out[below[torch.randperm(len(below), generator=draws)[:surplus]]] = 0
        return out

    return _each_group(rewards, groups, runs, score)


def remax(rewards: Tensor, groups: Tensor, runs: Tensor) -> Tensor:
    """A = R - R_greedy: the baseline is the task's greedy rollout, run 0 (arXiv:2310.10505).

    The greedy rollout itself has A = 0. A group without it is left out.
    """
    out = torch.full_like(rewards, torch.nan)
    for member in by_group(groups):
        greedy = rewards[member & (runs == 0)]
        if len(greedy):
            out[member] = rewards[member] - greedy[-1]
    out[runs == 0] = 0
    return out


def raft(rewards: Tensor, groups: Tensor, *, min_reward: float = 0.0) -> Tensor:
    """A = 1 for a group's best, if R > `min_reward`; the rest is left out (arXiv:2304.06767)."""
    out = torch.full_like(rewards, torch.nan)
    for member in by_group(groups):
        best = rewards[member].max()
        if best > min_reward:
            out[member & (rewards == best)] = 1
    return out


def _each_group(
    rewards: Tensor,
    groups: Tensor,
    runs: Tensor | None,
    score: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """`score(rewards of the group, those that count)` group by group."""
    counts = counted(rewards, groups, runs)
    out = torch.empty_like(rewards)
    for member in by_group(groups):
        out[member] = score(rewards[member], rewards[member & counts])
    return out

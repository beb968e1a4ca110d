"""Computes advantages of rollouts in their group (gdpo, gigpo, opmd, asymre, rec, raft).

Their form is that of algorithms/advantage.py.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trireme.algorithms.advantage import (
    by_group,
    counted,
    each_group,
    last_steps,
    takes_one_rollout,
)
from trireme.algorithms.part import AtLeast0
from trireme.config.options import Share


def gdpo(
    groups: Tensor,
    reward_parts: Tensor,
    reward_weights: Tensor,
    runs: Tensor | None = None,
    *,
    epsilon: AtLeast0 = 1e-4,
) -> Tensor:
    """A = whitened sum of w_k A_k, A_k being GRPO's of reward k alone (GDPO, arXiv:2601.05242).

    A_k = (R_k - mean) / (std + epsilon) over the group; whitened: less the mean over the batch,
    divided by std + epsilon. Each reward has its weight whatever its scale; in GRPO of the sum the
    largest scale dominates. A reward that does not apply to a rollout adds nothing to it. Several
    experiences of one run with the same rewards count once.
    """
    counts = counted(reward_parts.nan_to_num(nan=torch.inf), groups, runs)
    # equal rewards have an exact mean in float64: whitening would blow up a rounding of it
    parts, weights = reward_parts.double(), reward_weights.double().expand_as(reward_parts)
    summed = torch.zeros(len(groups), dtype=torch.float64)
    for member in by_group(groups):
        for part, weight in zip(parts.T, weights.T, strict=True):
            applies = member & ~part.isnan()
            measured = part[applies & counts]
            if len(measured) > 1:
                centred = part[applies] - measured.mean()
                summed[applies] += weight[applies] * centred / (measured.std() + epsilon)
    if counts.sum() > 1:
        summed = (summed - summed[counts].mean()) / (summed[counts].std() + epsilon)
    return summed.to(reward_parts.dtype)


def gigpo(
    rewards: Tensor,
    groups: Tensor,
    runs: Tensor,
    steps: Tensor,
    step_rewards: Tensor,
    anchors: Tensor,
    *,
    omega: AtLeast0 = 1.0,
    gamma: Share = 1.0,
    fnorm: Literal["none", "std"] = "none",
    epsilon: AtLeast0 = 1e-6,
) -> Tensor:
    """A = A_E + omega A_S: the episode's advantage and the step's own (GiGPO, arXiv:2505.10978).

    A_E compares the returns (sum of step rewards) of a task's runs. A_S compares the discounted
    returns from a step on among all steps of the batch with the same anchor state; a state that was
    seen once has A_S = 0. `fnorm: std` divides the differences by std + epsilon.
    """
    if fnorm not in ("none", "std"):
        raise ValueError(f"algorithm.advantage_fn_args.fnorm is '{fnorm}': 'none' or 'std'")
    run_of, last = last_steps(groups, runs, steps)
    step_rewards = step_rewards.double()  # equal returns have an exact mean
    to_go = torch.empty_like(step_rewards)
    for run in range(len(last)):
        mine = (run_of == run).nonzero().flatten()
        following = step_rewards.new_zeros(())
        for step_index in mine[steps[mine].argsort(descending=True)].tolist():
            following = step_rewards[step_index] + gamma * following
            to_go[step_index] = following
    totals = step_rewards.new_zeros(len(last)).index_add(0, run_of, step_rewards)
    divide = fnorm == "std"
    episode = _centred(totals, groups[last], divide=divide, epsilon=epsilon)[run_of]
    step = _centred(to_go, anchors, divide=divide, epsilon=epsilon)
    return (episode + omega * step).to(rewards.dtype)


def _centred(values: Tensor, groups: Tensor, *, divide: bool, epsilon: float) -> Tensor:
    """Return value - mean of its group, divided by the group's std if requested; 0 for a group of
    one.
    """
    out = torch.zeros_like(values)
    for member in by_group(groups):
        group_values = values[member]
        if len(group_values) > 1:
            scale = group_values.std() + epsilon if divide else 1.0
            out[member] = (group_values - group_values.mean()) / scale
    return out


def opmd(
    rewards: Tensor,
    groups: Tensor,
    runs: Tensor | None = None,
    *,
    opmd_baseline: Literal["mean", "logavgexp"] = "mean",
    tau: AtLeast0 = 1.0,
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

    def score(values: Tensor, counted_values: Tensor) -> Tensor:
        if len(counted_values) == 1:
            return values
        if opmd_baseline == "mean":
            return values - counted_values.mean()
        log_sum = (counted_values / tau).logsumexp(0)
        return values - tau * (log_sum - math.log(len(counted_values)))

    return each_group(rewards, groups, runs, score)


@takes_one_rollout
def asymre(
    rewards: Tensor, groups: Tensor, runs: Tensor | None = None, *, baseline_shift: float = -0.1
) -> Tensor:
    """A = R - (mean + shift): below the mean, failures weigh less (AsymRE, arXiv:2506.20520).

    A group of one has a baseline of 0.
    """

    def score(values: Tensor, counted_values: Tensor) -> Tensor:
        if len(counted_values) == 1:
            return values
        return values - (counted_values.mean() + baseline_shift)

    return each_group(rewards, groups, runs, score)


def rec(
    rewards: Tensor,
    groups: Tensor,
    runs: Tensor | None = None,
    *,
    epsilon: AtLeast0 = 1e-6,
    std_normalize: bool = False,
    drop: Literal["balance"] | None = None,
) -> Tensor:
    """A = R - mean, over the population's std + epsilon where asked (REC, arXiv:2509.24203).

    `drop: balance` gives A = 0 to random rollouts below the mean if most are, until as many remain
    as there are others; mean and std are then those of the remaining ones, so that A sums to 0. A
    group of one has A = 0: there is nothing to compare it with.
    """
    if drop not in (None, "balance"):
        raise ValueError(f"algorithm.advantage_fn_args.drop is '{drop}': 'balance' or none")
    # The rollouts of a task are exchangeable: the same draw for every batch is as random as any.
    draws = torch.Generator().manual_seed(0)

    def score(values: Tensor, counted_values: Tensor) -> Tensor:
        dropped = torch.zeros(len(values), dtype=torch.bool)
        remaining = counted_values
        if drop == "balance":
            below = (values < counted_values.mean()).nonzero().flatten()
            surplus = max(2 * len(below) - len(values), 0)
            dropped[below[torch.randperm(len(below), generator=draws)[:surplus]]] = True
            remaining = values[~dropped] if surplus else counted_values
        out = values - remaining.mean()
        if std_normalize:
            out = out / (remaining.std(correction=0) + epsilon)
        return out.masked_fill(dropped, 0)

    return each_group(rewards, groups, runs, score)


@takes_one_rollout
def raft(rewards: Tensor, groups: Tensor, *, min_reward: float = 0.0) -> Tensor:
    """A = 1 for a group's best, if R > `min_reward`; the rest is left out (arXiv:2304.06767)."""
    out = torch.full_like(rewards, torch.nan)
    for member in by_group(groups):
        best = rewards[member].max()
        if best > min_reward:
            out[member & (rewards == best)] = 1
    return out

"""Advantage: computes how much better each rollout did than its group (grpo, rloo, opmd, remax).

Functions `(rewards [N], groups [N], *, options) -> advantages [N]`; NaN says: leave this one out of
training. Further arguments that a function may name: `runs` and `steps` [N], the numbers in the
eid; `lengths` [N], trained tokens; `mean_logprobs` [N], of those tokens, where all experiences have
them; `step_rewards` [N], what a step earned by itself; `anchors` [N], equal where two steps were in
the same state of the environment; `reward_parts` [N, K], what each of K rewards gave (NaN where it
does not apply), and `reward_weights` [N, K]. They run before the buffer, where groups are whole;
advantages of single tokens are `in_trainer` and lie in token_advantage.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from trireme.algorithms.part import AtLeast0
from trireme.config.options import Share


def by_group(groups: Tensor) -> Iterator[Tensor]:
    """The members of each group, a bool [N] at a time, in the order of the group numbers."""
    for number in groups.unique():
        yield groups == number


def takes_one_rollout(function: Any) -> Any:
    """Decorator: the function asks for `groups`, and a task with one rollout is trained as well."""
    function.takes_one_rollout = True
    return function


def grpo(
    rewards: Tensor,
    groups: Tensor,
    runs: Tensor | None = None,
    mean_logprobs: Tensor | None = None,
    *,
    epsilon: AtLeast0 = 1e-6,
    std_threshold: Annotated[float | None, Ge(0)] = None,
    std_cal_level: Literal["group", "batch"] = "group",
    norm_by_std: bool = True,
    rank_penalty: Annotated[float | None, Ge(0)] = None,
) -> Tensor:
    """A = (R - mean) / (std + epsilon) over the group (DeepSeekMath, arXiv:2402.03300).

    std is the sample's (n - 1); `norm_by_std: false` divides by nothing (arXiv:2503.20783). A group
    of one has mean 0 and std 1. With `std_threshold`, groups whose std is not above it, and groups
    of one, are left out. `std_cal_level: batch` divides by the std of all rewards of the batch
    instead (arXiv:2508.08221). A run that left several experiences with one reward (a conversation
    whose template dropped thinking, say) counts once.

    `rank_penalty` p takes R (1 - p rank / n) for R, rank being how many of the group's n rollouts
    have a lower mean log-probability: of two right answers the unlikelier one gains more
    (arXiv:2506.02355).
    """
    if std_cal_level not in ("group", "batch"):
        raise ValueError(
            f"algorithm.advantage_fn_args.std_cal_level is '{std_cal_level}': 'group' or 'batch'"
        )
    advantages = torch.empty_like(rewards)
    counts = counted(rewards, groups, runs)
    if rank_penalty:
        rewards = _unlikely_first(rewards, groups, counts, mean_logprobs, rank_penalty)
    batch_std = rewards[counts].std() if counts.sum() > 1 else rewards.new_ones(())
    for member in by_group(groups):
        counted_rewards = rewards[member & counts]
        alone = len(counted_rewards) == 1
        mean = rewards.new_zeros(()) if alone else counted_rewards.mean()
        std = rewards.new_ones(()) if alone else counted_rewards.std()
        if std_threshold is not None and (alone or std <= std_threshold):
            advantages[member] = torch.nan
            continue
        scale = batch_std if std_cal_level == "batch" else std
        centred = rewards[member] - mean
        advantages[member] = centred / (scale + epsilon) if norm_by_std else centred
    return advantages


def reinforceplusplus_baseline(
    rewards: Tensor,
    groups: Tensor,
    runs: Tensor | None = None,
    *,
    epsilon: AtLeast0 = 1e-6,
    std_threshold: Annotated[float | None, Ge(0)] = None,
) -> Tensor:
    """A = (R - mean of the group) / (std over the batch + epsilon) (arXiv:2501.03262).

    REINFORCE++ with a baseline: the std is of these differences, not of the rewards.
    `std_threshold` is that of `grpo`.
    """
    centred = grpo(rewards, groups, runs, std_threshold=std_threshold, norm_by_std=False)
    measured = centred[counted(rewards, groups, runs) & ~centred.isnan()]
    return centred / (measured.std() + epsilon) if len(measured) > 1 else centred


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
    divided by std + epsilon. Rewards of different scales keep their say, which GRPO of their sum
    loses. A reward that does not apply to a rollout adds nothing to it. A run that left several
    experiences with the same rewards counts once.
    """
    counts = counted(reward_parts.nan_to_num(nan=torch.inf), groups, runs)
    summed = torch.zeros(len(groups), dtype=reward_parts.dtype)
    for member in by_group(groups):
        for part, weight in zip(
            reward_parts.T, reward_weights.expand_as(reward_parts).T, strict=True
        ):
            applies = member & ~part.isnan()
            measured = part[applies & counts]
            if len(measured) > 1:
                centred = part[applies] - measured.mean()
                summed[applies] += weight[applies] * centred / (measured.std() + epsilon)
    if counts.sum() < 2:
        return summed
    return (summed - summed[counts].mean()) / (summed[counts].std() + epsilon)


def dapo(
    rewards: Tensor,
    groups: Tensor,
    lengths: Tensor,
    runs: Tensor | None = None,
    *,
    epsilon: AtLeast0 = 1e-6,
    std_threshold: Annotated[float | None, Ge(0)] = 0.0,
    overlong_length: int | None = None,
    overlong_cache: int = 0,
    overlong_penalty: float = 1.0,
) -> Tensor:
    """GRPO of R + overlong(length); groups whose rewards are equal are left out (arXiv:2503.14476).

    overlong is 0 up to L - C trained tokens, -p beyond L, and (L - C - length) / C p between, with
    L `overlong_length` (not given: 0 always), C `overlong_cache`, p `overlong_penalty`. What is
    left out is sampled anew: the trainer waits until its batch is full (dynamic sampling).
    """
    if overlong_length is not None:
        if not 0 < overlong_cache <= overlong_length:
            raise ValueError(
                f"algorithm.advantage_fn_args.overlong_cache is {overlong_cache}: expected more "
                f"than 0 and at most overlong_length ({overlong_length})"
            )
        beyond = (overlong_length - overlong_cache - lengths) / overlong_cache
        rewards = rewards + beyond.clamp(-1, 0) * overlong_penalty
    return grpo(rewards, groups, runs, epsilon=epsilon, std_threshold=std_threshold)


def _unlikely_first(
    rewards: Tensor,
    groups: Tensor,
    counts: Tensor,
    mean_logprobs: Tensor | None,
    penalty: float,
) -> Tensor:
    """R (1 - p rank / n); equal log-probabilities have equal ranks."""
    if mean_logprobs is None:
        raise ValueError(
            "algorithm.advantage_fn_args.rank_penalty ranks rollouts by their log-probabilities, "
            "which not every experience has"
        )
    out = torch.empty_like(rewards)
    for member in by_group(groups):
        counted = mean_logprobs[member & counts]
        rank = (mean_logprobs[member][:, None] > counted).sum(1)
        out[member] = rewards[member] * (1 - penalty * rank / len(counted))
    return out


def counted(rewards: Tensor, groups: Tensor, runs: Tensor | None) -> Tensor:
    """True for the experiences that count in a group's mean [N]: the first of a run whose rewards
    are equal.

    `rewards` are [N], or [N, K] with K separate rewards.
    """
    counts = torch.ones(len(rewards), dtype=torch.bool)
    if runs is None:
        return counts
    once, run_of = torch.stack([groups, runs]).unique(dim=1, return_inverse=True)
    if once.shape[1] == len(run_of):
        return counts
    for mine in by_group(run_of):
        places = mine.nonzero().flatten()
        if len(places) > 1 and bool((rewards[places] == rewards[places[0]]).all()):
            counts[places[1:]] = False
    return counts


def step_wise_grpo(
    rewards: Tensor,
    groups: Tensor,
    runs: Tensor,
    steps: Tensor,
    *,
    epsilon: AtLeast0 = 1e-6,
    enable_step_norm: bool = False,
    std_threshold: Annotated[float | None, Ge(0)] = None,
    std_cal_level: Literal["group", "batch"] = "group",
) -> Tensor:
    """GRPO over the rewards of the runs' last steps, the score given to all steps of its run.

    With `enable_step_norm` a run's score is divided by the number of its steps, so that long and
    short episodes weigh the same. Thresholds are those of `grpo`, over whole runs.
    """
    run_of, last = last_steps(groups, runs, steps)
    scores = grpo(
        rewards[last],
        groups[last],
        epsilon=epsilon,
        std_threshold=std_threshold,
        std_cal_level=std_cal_level,
    )
    if enable_step_norm:
        scores = scores / torch.bincount(run_of, minlength=len(last))
    return scores[run_of]


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
    met once has A_S = 0. `fnorm` is what the differences are divided by: 1, or the std + epsilon.
    """
    if fnorm not in ("none", "std"):
        raise ValueError(f"algorithm.advantage_fn_args.fnorm is '{fnorm}': 'none' or 'std'")
    run_of, last = last_steps(groups, runs, steps)
    to_go = torch.empty_like(step_rewards)
    for run in range(len(last)):
        mine = (run_of == run).nonzero().flatten()
        following = step_rewards.new_zeros(())
        for step_index in mine[steps[mine].argsort(descending=True)].tolist():
            following = step_rewards[step_index] + gamma * following
            to_go[step_index] = following
    totals = torch.zeros_like(rewards[last]).index_add(0, run_of, step_rewards)
    episode = _centred(totals, groups[last], fnorm == "std", epsilon)[run_of]
    return episode + omega * _centred(to_go, anchors, fnorm == "std", epsilon)


def last_steps(groups: Tensor, runs: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The run number of each experience [N], and the index of each run's last step [R]."""
    _, run_of = torch.stack([groups, runs]).unique(dim=1, return_inverse=True)
    order = steps.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    highest = torch.zeros(int(run_of.max()) + 1, dtype=torch.long)
    return run_of, order[highest.scatter_reduce(0, run_of, rank, "amax")]


def _centred(values: Tensor, groups: Tensor, divide: bool, epsilon: float) -> Tensor:
    """value - mean of its group, over the group's std where asked; 0 for a group of one."""
    out = torch.zeros_like(values)
    for member in by_group(groups):
        group_values = values[member]
        if len(group_values) > 1:
            scale = group_values.std() + epsilon if divide else 1.0
            out[member] = (group_values - group_values.mean()) / scale
    return out


def reinforce(rewards: Tensor) -> Tensor:
    """A = R (REINFORCE, Williams 1992)."""
    return rewards.clone()


def rloo(rewards: Tensor, groups: Tensor, runs: Tensor | None = None) -> Tensor:
    """A = (R - mean) n / (n - 1): R less the mean of the others (RLOO, arXiv:2402.14740).

    A group of one has A = R.
    """

    def score(member: Tensor, group_rewards: Tensor) -> Tensor:
        n = len(group_rewards)
        return member if n == 1 else (member - group_rewards.mean()) * n / (n - 1)

    return _each_group(rewards, groups, runs, score)


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

    def score(member: Tensor, group_rewards: Tensor) -> Tensor:
        if len(group_rewards) == 1:
            return member
        if opmd_baseline == "mean":
            return member - group_rewards.mean()
        return member - tau * ((group_rewards / tau).logsumexp(0) - math.log(len(group_rewards)))

    return _each_group(rewards, groups, runs, score)


@takes_one_rollout
def asymre(
    rewards: Tensor, groups: Tensor, runs: Tensor | None = None, *, baseline_shift: float = -0.1
) -> Tensor:
    """A = R - (mean + shift): below the mean, failures weigh less (AsymRE, arXiv:2506.20520).

    A group of one has a baseline of 0.
    """

    def score(member: Tensor, group_rewards: Tensor) -> Tensor:
        return (
            member if len(group_rewards) == 1 else member - (group_rewards.mean() + baseline_shift)
        )

    return _each_group(rewards, groups, runs, score)


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

    `drop: balance` gives A = 0 to as many below-mean rollouts, drawn at random, as there are more
    of them than of the others; mean and std are then those of the rest, so that it sums to 0. A
    group of one has A = 0: there is nothing to compare it with.
    """
    if drop not in (None, "balance"):
        raise ValueError(f"algorithm.advantage_fn_args.drop is '{drop}': 'balance' or none")
    # The rollouts of a task are exchangeable: the same draw for every batch is as random as any.
    draws = torch.Generator().manual_seed(0)

    def score(member: Tensor, group_rewards: Tensor) -> Tensor:
        dropped = torch.zeros(len(member), dtype=torch.bool)
        rest = group_rewards
        if drop == "balance":
            below = (member < group_rewards.mean()).nonzero().flatten()
            surplus = max(2 * len(below) - len(member), 0)
            dropped[below[torch.randperm(len(below), generator=draws)[:surplus]]] = True
            rest = member[~dropped] if surplus else group_rewards
        out = member - rest.mean()
        if std_normalize:
            out = out / (rest.std(correction=0) + epsilon)
        return out.masked_fill(dropped, 0)

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


@takes_one_rollout
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

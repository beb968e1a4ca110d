"""Advantage: computes how much better each rollout did than its group (grpo, rloo, opmd, remax).

Functions `(rewards [N], groups [N], *, options) -> advantages [N]`; NaN means: leave this one out
of training. Further arguments that a function may name: `runs` and `steps` [N], the numbers in the
eid; `lengths` [N], trained tokens; `mean_logprobs` [N], of those tokens, where all experiences have
them; `step_rewards` [N], the reward of each step alone; `anchors` [N], equal where two steps were
in the same state of the environment; `reward_parts` [N, K], the value of each of K rewards (NaN
where it does not apply), and `reward_weights` [N, K]. They run before the buffer, where groups are
whole; advantages of single tokens are `in_trainer` and are defined in token_advantage.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from trireme.algorithms.part import AtLeast0
from trireme.extensions import former_names


def by_group(groups: Tensor) -> Iterator[Tensor]:
    """Yield the members of each group, a bool [N] at a time, in the order of the group numbers."""
    for number in groups.unique():
        yield groups == number


def moments(
    values: Tensor, groups: Tensor, counts: Tensor | None = None, *, correction: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the group's index of each value [N], and each group's size, mean and standard
    deviation [G], in float64, in which those of equal values are exact: their deviation is 0.

    `counts` [N] is true for the values that count. The deviation divides by the size less
    `correction`, and is NaN where that is 0. A value too large to square in its own dtype makes
    its group's mean and deviation NaN. It is computed by numpy: each operation of torch gives up
    Python's lock, and waits for a thread that writes meanwhile for longer than it takes.
    """
    names, index = np.unique(groups.numpy(force=True), return_inverse=True)
    kept = slice(None) if counts is None else counts.numpy(force=True)
    large = ~values.square().isfinite()
    exact, of = values.double().masked_fill(large, torch.nan).numpy(force=True)[kept], index[kept]
    size = np.bincount(of, minlength=len(names)).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.bincount(of, exact, len(names)) / size
        squares = np.bincount(of, np.square(exact - mean[of]), len(names))
        std = np.sqrt(squares / (size - correction))
    at, of_groups = torch.from_numpy(index), map(torch.from_numpy, (size, mean, std))
    size_, mean_, std_ = (row.to(values.device) for row in of_groups)
    return at.to(values.device), size_, mean_, std_


def takes_one_rollout(function: Any) -> Any:
    """Mark a function that takes `groups` as valid for tasks with a single rollout."""
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
    counts = counted(rewards, groups, runs)
    if rank_penalty:
        rewards = _unlikely_first(rewards, groups, counts, mean_logprobs, rank_penalty)
    index, size, mean, std = moments(rewards, groups, counts)
    alone, measured = size == 1, counts & mean[index].isfinite()
    mean, std = mean.masked_fill(alone, 0.0), std.masked_fill(alone, 1.0)
    advantages = rewards - mean[index]
    if norm_by_std and std_cal_level == "group":
        advantages = advantages / (std[index] + epsilon)
    elif norm_by_std:
        # without groups that are left out: one reward that is NaN would be in all advantages
        batch_std = rewards[measured].std() if measured.sum() > 1 else 1.0
        advantages = advantages / (batch_std + epsilon)
    if std_threshold is not None:
        advantages = advantages.masked_fill((alone | (std <= std_threshold))[index], torch.nan)
    return advantages.to(rewards.dtype)


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
    """GRPO of R + overlong(length); groups whose sums are equal are left out (arXiv:2503.14476).

    overlong is 0 up to L - C trained tokens, -p beyond L, and (L - C - length) / C p between, with
    L `overlong_length` (not given: 0 always), C `overlong_cache`, p `overlong_penalty`. What is
    left out is sampled anew: the trainer waits until its batch is full (dynamic sampling). A group
    that is all right, or all wrong, stays if its penalties differ: the operator
    `dapo_dynamic_sampling` leaves it out as well.
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
    """Return R (1 - p rank / n); equal log-probabilities have equal ranks."""
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
    """Return [N], True for the experiences that count in a group's mean: the first of a run whose
    rewards are equal.

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


def last_steps(groups: Tensor, runs: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the run number of each experience [N], and the index of each run's last step [R]."""
    _, run_of = torch.stack([groups, runs]).unique(dim=1, return_inverse=True)
    order = steps.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    highest = torch.zeros(int(run_of.max()) + 1, dtype=torch.long)
    return run_of, order[highest.scatter_reduce(0, run_of, rank, "amax")]


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

    return each_group(rewards, groups, runs, score)


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


def each_group(
    rewards: Tensor,
    groups: Tensor,
    runs: Tensor | None,
    score: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """`score(rewards of the group, those that count)` group by group, in float64, in which the mean
    of equal rewards is exact.
    """
    counts = counted(rewards, groups, runs)
    exact, out = rewards.double(), torch.empty_like(rewards)
    for member in by_group(groups):
        out[member] = score(exact[member], exact[member & counts]).to(out.dtype)
    return out


__getattr__ = former_names(__name__)

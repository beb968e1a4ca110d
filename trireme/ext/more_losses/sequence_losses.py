"""Losses of whole samples and of groups; see algorithms/sequence_loss.py for their form."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trireme.algorithms.advantage import by_group
from trireme.algorithms.kl import segment_mean, segment_sum
from trireme.algorithms.part import Above0, AtLeast0
from trireme.algorithms.policy_loss import (
    MAX_LOG_RATIO,
    Reported,
    idle_at_zero_advantage,
    log_ratio_of,
    selects,
)
from trireme.algorithms.sequence_loss import of_groups, of_sequences, sequence_log_ratio


@of_sequences
@idle_at_zero_advantage
def geo_mean(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sample_ids: Tensor,
    *,
    clip_range_low: AtLeast0 = 0.4,
    clip_range_high: AtLeast0 = 0.4,
) -> Reported:
    """-A exp(mean c), c = log r, at most `high` where A > 0, at least -`low` where A < 0 (GMPO,
    arXiv:2507.20673).

    The geometric mean of a sample's ratios, each clipped before it enters: no single token moves
    the sample far.
    """
    log_ratio = log_ratio_of(logprobs, old_logprobs)
    clipped = torch.where(
        advantages > 0, log_ratio.clamp(max=clip_range_high), log_ratio.clamp(min=-clip_range_low)
    )
    mean = segment_mean(clipped.detach(), sample_ids)
    loss = -advantages * (clipped - clipped.detach() + mean).exp()
    changed = (clipped != log_ratio).float()
    return loss, {"pg_clipfrac": changed, "ppo_kl": -log_ratio.detach()}


@idle_at_zero_advantage
def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sample_ids: Tensor,
    *,
    k_pos: AtLeast0 = 2.0,
    lambda_pos: Above0 = 3.0,
    k_neg: AtLeast0 = 3.0,
    lambda_neg: Above0 = 2.0,
) -> Reported:
    """-sg(w^k exp(l (1 - w))) A log p, w = exp(sum log r) of the sample (VESPO, arXiv:2602.10693).

    A smooth weight in place of a clip: 1 on policy, and near 0 where the sample has become much
    likelier or less likely. `k_pos` and `lambda_pos` are k and l where A >= 0, the others where
    A < 0. log r of a token is clamped to +-20, log w to log 1e-8 .. 20.
    """
    log_ratio = log_ratio_of(logprobs.detach(), old_logprobs)
    log_w = segment_sum(log_ratio, sample_ids).clamp(math.log(1e-8), MAX_LOG_RATIO)
    positive = advantages >= 0
    k = torch.full_like(log_w, k_neg).masked_fill(positive, k_pos)
    scale = torch.full_like(log_w, lambda_neg).masked_fill(positive, lambda_pos)
    weight = (k * log_w + scale * (1 - log_w.exp())).exp()
    reported = {"vespo_weight": weight, "ppo_kl": (old_logprobs - logprobs).detach()}
    return -weight * advantages * logprobs, reported


def label_weights(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sample_ids: Tensor,
    group_ids: Tensor,
    samples_per_group: Tensor,
    *,
    tau: float = 0.5,
) -> Tensor:
    """Return the factors of each entry's log r [M] in REAL: the slope of its loss in the sample's
    mean.

    The loss is that of a group, which may span several micro-batches: its slope is computed over
    the whole batch before, and log r times it has the loss's gradient. The mean is over groups and
    the weights are by sample; `samples_per_group` converts one into the other.
    """
    first = sample_ids.diff(prepend=sample_ids.new_tensor([-1])) != 0  # one entry of each sample
    scores = segment_mean(logprobs - old_logprobs, sample_ids)[first] / tau
    right = segment_mean(advantages, sample_ids)[first] > 0
    groups = group_ids[first]
    slopes = torch.zeros_like(scores)
    for member in by_group(groups):
        rights, wrongs = member & right, member & ~right
        if not (rights.any() and wrongs.any()):
            continue
        for side, sign in ((rights, -1), (wrongs, 1)):
            logits = torch.cat([sign * scores[side], scores.new_zeros(1)])
            slopes[side] = sign * logits.softmax(0)[:-1] / tau
    return (slopes * samples_per_group)[first.cumsum(0) - 1]


@of_groups
@selects(label_weights)
def real(logprobs: Tensor, old_logprobs: Tensor, *, tau: Above0 = 0.5) -> Reported:
    """log(1 + sum_right e^(-s/t)) + log(1 + sum_wrong e^(s/t)) of a group (REAL, arXiv:2602.05630).

    s is the mean of log r over the sample, t `tau`; right are rollouts with A > 0, and a group that
    lacks either side adds nothing, but counts in the mean over groups, as one without a trained
    token does. The advantages' sign alone counts. The reported loss is the first-order part: s
    times its slope.
    """
    return logprobs - old_logprobs, {"ppo_kl": (old_logprobs - logprobs).detach()}


ClipMode = Literal["none", "one-side", "gspo-one-side", "two-side", "ring"]


Weight = Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"]


def rec(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sample_ids: Tensor,
    *,
    clip_mode: ClipMode = "none",
    epsilon_low: AtLeast0 = 0.2,
    epsilon_high: AtLeast0 = 0.2,
    epsilon_low_prime: AtLeast0 = 0.6,
    epsilon_high_prime: AtLeast0 = 2.0,
    weight: Weight = "none",
    temp: Above0 = 1.0,
    regularizer: Literal["none", "k2", "forward-kl"] = "none",
    regularizer_coef: AtLeast0 = 0.0,
) -> Reported:
    """-w A log p where r is in range, + c times a regularizer (REC, arXiv:2509.24203).

    In range: one-side, r <= 1 + high where A >= 0 and r >= 1 - low where A < 0; gspo-one-side, the
    same of the sample's mean ratio; two-side, both bounds always; ring, two-side, or r <= 1 - low'
    where A >= 0, or r >= 1 + high' where A <= 0. w: 1, sg(r), the sample's, or exp(A / temp).
    Regularizers: k2, (log r)^2; forward-kl, -log r.
    """
    log_ratio = log_ratio_of(logprobs, old_logprobs)
    ratio = log_ratio.exp().detach()
    whole = sequence_log_ratio(logprobs, old_logprobs, sample_ids).exp().detach()
    inside = (ratio >= 1 - epsilon_low) & (ratio <= 1 + epsilon_high)
    far_low = (advantages >= 0) & (ratio <= 1 - epsilon_low_prime)
    far_high = (advantages <= 0) & (ratio >= 1 + epsilon_high_prime)
    ranges = {
        "none": torch.ones_like(inside),
        "one-side": _one_side(ratio, advantages, epsilon_low, epsilon_high),
        "gspo-one-side": _one_side(whole, advantages, epsilon_low, epsilon_high),
        "two-side": inside,
        "ring": inside | far_low | far_high,
    }
    factors = {
        "none": torch.ones_like(ratio),
        "importance_sampling": ratio,
        "gspo_importance_sampling": whole,
        "advantage": (advantages / temp).exp(),
    }
    regularizers = {
        "none": torch.zeros_like(logprobs),
        "k2": log_ratio.square(),
        "forward-kl": -log_ratio,
    }
    in_range = _one_of("clip_mode", clip_mode, ranges)
    loss = -_one_of("weight", weight, factors) * advantages * logprobs * in_range
    loss = loss + regularizer_coef * _one_of("regularizer", regularizer, regularizers)
    return loss, {"pg_clipfrac": (~in_range).float(), "ppo_kl": -log_ratio.detach()}


def _one_side(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.where(advantages >= 0, ratio <= 1 + high, ratio >= 1 - low)


def _one_of(option: str, name: str, known: dict[str, Tensor]) -> Tensor:
    if name not in known:
        raise ValueError(
            f"algorithm.policy_loss_fn_args.{option} is '{name}': expected one of "
            f"{', '.join(known)}"
        )
    return known[name]

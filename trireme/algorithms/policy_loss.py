"""Policy loss: computes the loss of each trained token (ppo, cispo, mix, sft), before averaging.

Functions of flat tokens `(logprobs, old_logprobs, advantages, ..., *, options) -> loss [M]`, or a
pair of it and a dict of [M] tensors whose means are reported as `actor/<name>`. Masking and
averaging are not theirs. They may name any field of the batch (`batch.FIELD_NAMES`), `sample_ids`,
`positions`, `ref_logprobs`, `expert` (which tokens are an expert's) and `step` (how many
train steps were done before this one: 0 in the first).

Notation: r = p / p_old, sg(x) is x without a gradient.

Losses of whole samples, and of pairs of them, lie in sequence_loss.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from trireme.algorithms.kl import LossAggMode, segment_mean, segment_sum
from trireme.algorithms.part import Above0, AtLeast0
from trireme.config.options import Share
from trireme.extensions import former_names

Loss = TypeVar("Loss", bound=Callable)
Reported = tuple[Tensor, dict[str, Tensor]]
Level = Literal["token", "sequence", "geometric"]

# exp(20) is finite in float32; a ratio beyond it is a broken one.
MAX_LOG_RATIO = 20.0


def idle_at_zero_advantage(loss: Loss) -> Loss:
    """Mark a loss without gradient where the advantage is 0, so that training may leave such
    samples out.
    """
    loss.idle_at_zero_advantage = True
    return loss


def selects(choose: Callable[..., Tensor]) -> Callable[[Loss], Loss]:
    """Register `choose`, a function of data by name and of the loss's options, which decides over
    the whole batch from which tokens [M] the loss learns: a bool, or the factor of each token's
    loss.
    """

    def decorate(loss: Loss) -> Loss:
        loss.selects = choose
        return loss

    return decorate


def log_ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return log r, clamped where its exponential is finite."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@idle_at_zero_advantage
def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sample_ids: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    *,
    clip_range: AtLeast0 = 0.2,
    clip_range_low: Annotated[float | None, Ge(0)] = None,
    clip_range_high: Annotated[float | None, Ge(0)] = None,
    clip_ratio_c: Annotated[float, Gt(1)] = 3.0,
    enable_sequence_masking: bool = False,
    delta_sequence_masking: AtLeast0 = 0.1,
    fallback_to_policy_gradient: bool = False,
) -> Reported:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv:1707.06347).

    Where A < 0 it is at most -A c (dual clip, arXiv:1912.09729). `clip_range` stands for the low
    and the high one where they are not given; a higher high one is DAPO's (arXiv:2503.14476).
    `enable_sequence_masking` leaves out tokens with A < 0 of samples that are far from the policy:
    whose mean of log p_sampler - log p is above `delta_sequence_masking`.
    `fallback_to_policy_gradient` takes p itself for p_old.
    """
    if clip_ratio_c <= 1:
        raise ValueError(
            f"algorithm.policy_loss_fn_args.clip_ratio_c is {clip_ratio_c:g}: expected more than 1"
        )
    low = clip_range if clip_range_low is None else clip_range_low
    high = clip_range if clip_range_high is None else clip_range_high
    drift = log_ratio_of(logprobs, old_logprobs)
    log_ratio = logprobs - logprobs.detach() if fallback_to_policy_gradient else drift
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(plain, clipped)
    bound = -advantages * clip_ratio_c
    bounded = (advantages < 0) & (pessimistic > bound)
    loss = torch.where(bounded, bound, pessimistic)
    reported = {
        "pg_clipfrac": (clipped > plain).float(),
        "pg_clipfrac_lower": bounded.float(),
        "ppo_kl": -drift.detach(),
    }
    if enable_sequence_masking:
        assert sample_ids is not None, "every batch has sample_ids"
        if sampler_logprobs is not None:  # p_old may be the trainer's own, of these very weights
            drift = log_ratio_of(logprobs, sampler_logprobs)
        far = segment_mean(-drift.detach(), sample_ids) > delta_sequence_masking
        masked = far & (advantages < 0)
        loss = loss * ~masked
        reported["masked"] = masked.float()
    return loss, reported


def sft(logprobs: Tensor) -> Tensor:
    """-log p: the cross-entropy of the data's tokens."""
    return -logprobs


@idle_at_zero_advantage
def importance_sampling(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A r: the policy gradient off its policy, unclipped."""
    return -advantages * log_ratio_of(logprobs, old_logprobs).exp()


@idle_at_zero_advantage
def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_range_low: AtLeast0 = 1.0,
    clip_range_high: AtLeast0 = 0.28,
    enable_mask_clip: bool = False,
    mask_clip_range_low: AtLeast0 = 1.0,
    mask_clip_range_high: AtLeast0 = 0.28,
) -> Reported:
    """-A sg(clip(r, 1 - low, 1 + high)) log p: a clipped token still learns (arXiv:2506.13585).

    `enable_mask_clip` leaves out what PPO would clip at the ranges of the mask: r too large where
    A > 0, too small where A < 0.
    """
    ratio = log_ratio_of(logprobs, old_logprobs).exp().detach()
    clipped = ratio.clamp(1 - clip_range_low, 1 + clip_range_high)
    loss = -advantages * clipped * logprobs
    if enable_mask_clip:
        above = (advantages > 0) & (ratio > 1 + mask_clip_range_high)
        below = (advantages < 0) & (ratio < 1 - mask_clip_range_low)
        loss = loss * ~(above | below)
    return loss, {"pg_clipfrac": (clipped != ratio).float()}


def mix(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    expert: Tensor,
    *,
    mu: Share = 0.1,
    clip_range: AtLeast0 = 0.2,
    clip_range_low: Annotated[float | None, Ge(0)] = None,
    clip_range_high: Annotated[float | None, Ge(0)] = None,
    sft_loss_agg_mode: LossAggMode | None = None,
    grpo_loss_agg_mode: LossAggMode | None = None,
) -> Reported:
    """(1 - mu) PPO on own tokens, mu (-log p) on an expert's (arXiv:2505.17826).

    Experts' and own tokens are averaged each over their own kind (`Recipe.weights`), so that mu
    says how the two weigh whatever their numbers are: an expert's by `sft_loss_agg_mode`, own ones
    by `grpo_loss_agg_mode`, each not given: `loss_agg_mode`.
    """
    loss, reported = ppo(
        logprobs,
        old_logprobs,
        advantages,
        clip_range=clip_range,
        clip_range_low=clip_range_low,
        clip_range_high=clip_range_high,
    )
    return torch.where(expert, mu * sft(logprobs), (1 - mu) * loss), of_own_tokens(reported, expert)


def of_own_tokens(reported: dict[str, Tensor], expert: Tensor) -> dict[str, Tensor]:
    """Return the reported metrics without an expert's tokens."""
    return {name: values[~expert] for name, values in reported.items()}


def rollout_correction(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    sample_ids: Tensor,
    expert: Tensor | None = None,
    *,
    rollout_is: Level | None = None,
    rollout_is_threshold: Above0 = 2.0,
    rollout_rs: Level | None = None,
    rollout_rs_threshold: Above0 = 2.0,
    rollout_rs_threshold_lower: Annotated[float | None, Gt(0)] = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """w = min(p_trainer / p_sampler, C), and 0 outside [1 / T, T] (IMPALA, arXiv:1802.01561).

    Engine and trainer never compute exactly the same probabilities. `rollout_is` weighs each
    token's policy loss by the ratio of the two, truncated (TIS); `rollout_rs` leaves out what lies
    outside a band (masked: MIS).

    token: the token's ratio; sequence: the product over its sample; geometric: the product's n-th
    root. C is `rollout_is_threshold`, T `rollout_rs_threshold`, 1 / T may be given as
    `rollout_rs_threshold_lower`. No sampler drew the tokens of an `expert` [M]: their weight is 1,
    and no measure has them.
    """
    differences = logprobs.detach() - sampler_logprobs
    weights = torch.ones_like(differences)
    plain = differences.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    reported = {
        "kl": -differences,
        "k3_kl": plain - 1 - differences,
        "ratio": plain,
        "chi2": plain.square() - 1,
        "trainer_nll": -logprobs.detach(),
        "sampler_nll": -sampler_logprobs,
    }
    if rollout_is is not None:
        ratio = _ratio("rollout_is", rollout_is, differences, sample_ids)
        weights = ratio.clamp(max=rollout_is_threshold)
        reported["truncated"] = (ratio > rollout_is_threshold).float()
    if rollout_rs is not None:
        lower = rollout_rs_threshold_lower
        lower = 1 / rollout_rs_threshold if lower is None else lower
        ratio = _ratio("rollout_rs", rollout_rs, differences, sample_ids)
        outside = (ratio < lower) | (ratio > rollout_rs_threshold)
        weights = weights * ~outside
        reported["masked"] = outside.float()
    reported["weight"] = weights
    if expert is not None:
        weights = weights.masked_fill(expert, 1.0)
        reported = of_own_tokens(reported, expert)
    return weights, reported


def sampler_measures(metrics: Mapping[str, float]) -> dict[str, float]:
    """Derive measures from the means that `rollout_correction` reports: the effective sample size
    as a share of the tokens, (mean w)^2 / mean w^2, and the perplexities of both sides.

    Ratios so small that float32 rounds their squares to 0 have no effective sample size.
    """
    of = "rollout_correction/"
    if f"{of}ratio" not in metrics:
        return {}
    trainer, sampler = metrics[f"{of}trainer_nll"], metrics[f"{of}sampler_nll"]
    mean_square = metrics[f"{of}chi2"] + 1
    measures = {f"{of}ess": metrics[f"{of}ratio"] ** 2 / mean_square} if mean_square > 0 else {}
    return measures | {
        f"{of}trainer_ppl": math.exp(min(trainer, MAX_LOG_RATIO)),
        f"{of}sampler_ppl": math.exp(min(sampler, MAX_LOG_RATIO)),
    }


def _ratio(option: str, level: str, differences: Tensor, sample_ids: Tensor) -> Tensor:
    """Return p_trainer / p_sampler of each entry [M], at its level."""
    levels = {
        "token": lambda: differences,
        "sequence": lambda: segment_sum(differences, sample_ids),
        "geometric": lambda: segment_mean(differences, sample_ids),
    }
    if level not in levels:
        raise ValueError(
            f"algorithm.rollout_correction.{option} is '{level}': expected one of "
            f"{', '.join(levels)}"
        )
    return levels[level]().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


__getattr__ = former_names(__name__)

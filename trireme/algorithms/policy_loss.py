"""Policy loss: computes the loss of each trained token (ppo, cispo, sapo, sft), before averaging.

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

from trireme.algorithms.kl import LossAggMode, discounted_ahead, segment_mean, segment_sum
from trireme.algorithms.part import Above0, AtLeast0
from trireme.config.options import Share

Loss = TypeVar("Loss", bound=Callable)
Reported = tuple[Tensor, dict[str, Tensor]]
Level = Literal["token", "sequence", "geometric"]

# exp(20) is finite in float32; a ratio beyond it is a broken one.
MAX_LOG_RATIO = 20.0


def idle_at_zero_advantage(loss: Loss) -> Loss:
    """Decorator: says that the loss has no gradient where the advantage is 0, so that training may
    leave such samples out."""
    loss.idle_at_zero_advantage = True
    return loss


def selects(choose: Callable[..., Tensor]) -> Callable[[Loss], Loss]:
    """Decorator: `choose`, a function of data by name and of the loss's options, says of the whole
    batch which tokens [M] the loss learns from: a bool, or what each one's loss is multiplied by.
    """

    def decorate(loss: Loss) -> Loss:
        loss.selects = choose
        return loss

    return decorate


def log_ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log r, clamped where its exponential is finite."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@idle_at_zero_advantage
def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sample_ids: Tensor | None = None,
    *,
    clip_range: AtLeast0 = 0.2,
    clip_range_low: Annotated[float | None, Ge(0)] = None,
    clip_range_high: Annotated[float | None, Ge(0)] = None,
    clip_ratio_c: Annotated[float, Ge(1)] = 3.0,
    enable_sequence_masking: bool = False,
    delta_sequence_masking: AtLeast0 = 0.1,
    fallback_to_policy_gradient: bool = False,
) -> Reported:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv:1707.06347).

    Where A < 0 it is at most -A c (dual clip, arXiv:1912.09729). `clip_range` stands for the low
    and the high one where they are not given; a higher high one is DAPO's (arXiv:2503.14476).
    `enable_sequence_masking` leaves out tokens with A < 0 of samples whose mean of -log r is above
    `delta_sequence_masking`. `fallback_to_policy_gradient` takes p itself for p_old.
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
        far = segment_mean(-drift.detach(), sample_ids) > delta_sequence_masking
        masked = far & (advantages < 0)
        loss = loss * ~masked
        reported["masked"] = masked.float()
    return loss, reported


def sft(logprobs: Tensor) -> Tensor:
    """-log p: the cross-entropy of the data's tokens."""
    return -logprobs


def sft_is(logprobs: Tensor) -> Tensor:
    """-sg(p) log p: tokens that the policy finds unlikely weigh little (arXiv:2508.05629)."""
    return -logprobs.detach().exp() * logprobs


def sft_phi(logprobs: Tensor, *, cutoff_prob: Share = 1.0) -> Tensor:
    """-sg(p (1 - p)) log p: the tokens that are neither known nor hopeless (arXiv:2508.11408).

    Tokens with p above `cutoff_prob` weigh 0.
    """
    p = logprobs.detach().exp()
    return -(p * (1 - p) * (p <= cutoff_prob)) * logprobs


@idle_at_zero_advantage
def opmd(logprobs: Tensor, advantages: Tensor, *, tau: AtLeast0 = 1.0) -> Tensor:
    """-A log p / (1 + tau) (OPMD, arXiv:2505.17826)."""
    return -advantages * logprobs / (1 + tau)


@idle_at_zero_advantage
def importance_sampling(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A r: the policy gradient off its policy, unclipped."""
    return -advantages * log_ratio_of(logprobs, old_logprobs).exp()


def second_moment_mask(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    m2_threshold: float = 0.04,
    log_ratio_clip: float = MAX_LOG_RATIO,
) -> Tensor:
    """True for the tokens that M2PO learns from: those with the largest |log r| go until the mean
    of (log r)^2 is at most the threshold, both taken over the tokens that PPO's clip would touch (A
    > 0 and r > 1, A < 0 and r < 1).
    """
    log_ratio = (logprobs - old_logprobs).clamp(-log_ratio_clip, log_ratio_clip)
    touched = log_ratio * advantages > 0
    squares, order = log_ratio[touched].square().sort()
    counts = torch.arange(1, len(squares) + 1, device=squares.device)
    too_far = squares.cumsum(0) / counts > m2_threshold  # means of sorted numbers only rise
    selected = torch.ones_like(touched)
    selected[touched.nonzero().flatten()[order[too_far]]] = False
    return selected


@idle_at_zero_advantage
@selects(second_moment_mask)
def m2po(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    m2_threshold: Above0 = 0.04,
    log_ratio_clip: Above0 = MAX_LOG_RATIO,
) -> Reported:
    """-A r, but for the tokens that moved furthest (M2PO, arXiv:2510.01161).

    They are left out until the mean of (log r)^2 over the batch is at most `m2_threshold`; log r
    is clipped at `log_ratio_clip`.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-log_ratio_clip, log_ratio_clip)
    return -advantages * log_ratio.exp(), {"ppo_kl": -log_ratio.detach()}


def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    dppo_mask_low: AtLeast0 = 0.2,
    dppo_mask_high: AtLeast0 = 0.2,
    kl_tau: AtLeast0 = 1e-3,
) -> Reported:
    """-A r + tau (log r)^2, the first term where p - p_old stays within bounds (arXiv:2602.04879).

    It is left out where A > 0 and p is more than `dppo_mask_high` above p_old, or A < 0 and p more
    than `dppo_mask_low` below it: the trust region is one of probabilities, so that a rare token,
    whose ratio is soon large, may still move. tau is `kl_tau`.
    """
    log_ratio = log_ratio_of(logprobs, old_logprobs)
    moved = logprobs.detach().exp() - old_logprobs.exp()
    masked = torch.where(advantages > 0, moved > dppo_mask_high, moved < -dppo_mask_low)
    loss = -advantages * log_ratio.exp() * ~masked + kl_tau * log_ratio.square()
    return loss, {"masked": masked.float(), "ppo_kl": -log_ratio.detach()}


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


@idle_at_zero_advantage
def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    tau_pos: Above0 = 1.0,
    tau_neg: Above0 = 1.05,
) -> Tensor:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate in place of a clip (SAPO, arXiv:2511.20347).

    tau is `tau_pos` where A > 0, else `tau_neg`. The gradient is that of -A r at r = 1 and fades on
    both sides.
    """
    ratio = log_ratio_of(logprobs, old_logprobs).exp()
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    return -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))


@idle_at_zero_advantage
def fipo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sample_ids: Tensor,
    positions: Tensor,
    *,
    clip_range_low: AtLeast0 = 0.2,
    clip_range_high: AtLeast0 = 0.2,
    clip_ratio_c: Annotated[float | None, Gt(1)] = None,
    half_life: Above0 = 32.0,
    influence_clip: AtLeast0 = 0.2,
    influence_clip_high_only: bool = True,
    safety_threshold: Annotated[float | None, Ge(0)] = 4.0,
) -> Reported:
    """sg(f) PPO, f_t = clip(exp(sum_k g^k log r_{t+k})): what followed counts (arXiv:2603.19835).

    g is 2^(-1 / `half_life`). f is clamped to 1 +- `influence_clip`, or above 1 with
    `influence_clip_high_only`; 0 does not clip. Where A < 0 and r > `safety_threshold` it is at
    most 1 and at least 0.8. `clip_ratio_c` bounds the loss where A < 0, as ppo's does, and leaves
    tokens with r above it out of the sum; None: neither.
    """
    drift = log_ratio_of(logprobs, old_logprobs).detach()
    ratio = drift.exp()
    counted = drift if clip_ratio_c is None else drift * (ratio <= clip_ratio_c)
    ahead = discounted_ahead(counted, sample_ids, positions, 2 ** (-1 / half_life))
    influence = ahead.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if influence_clip:
        least = 1.0 if influence_clip_high_only else 1 - influence_clip
        influence = influence.clamp(least, 1 + influence_clip)
    if safety_threshold is not None:
        unsafe = (advantages < 0) & (ratio > safety_threshold)
        influence = torch.where(unsafe, influence.clamp(0.8, 1.0), influence)
    loss, reported = ppo(
        logprobs,
        old_logprobs,
        advantages,
        clip_range_low=clip_range_low,
        clip_range_high=clip_range_high,
        clip_ratio_c=math.inf if clip_ratio_c is None else clip_ratio_c,
    )
    return loss * influence, reported | {"influence": influence}


@idle_at_zero_advantage
def topr(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, advantage_threshold: float = 0.0
) -> Tensor:
    """-sg(a) A log p, a = clip(r, 0, 1) where A <= threshold, else 1 (TOPR, arXiv:2503.14286)."""
    ratio = log_ratio_of(logprobs, old_logprobs).exp().detach()
    taper = torch.where(advantages <= advantage_threshold, ratio.clamp(0, 1), 1.0)
    return -taper * advantages * logprobs


@idle_at_zero_advantage
def sppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, epsilon: AtLeast0 = 0.3
) -> Reported:
    """-A log r where 1 / (1 + e) <= r <= 1 + e, else 0 (sPPO, arXiv:2108.05828)."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio_of(logprobs, old_logprobs).exp().detach()
    inside = (ratio >= 1 / (1 + epsilon)) & (ratio <= 1 + epsilon)
    return -advantages * log_ratio * inside, {"pg_clipfrac": (~inside).float()}


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
    return torch.where(expert, mu * sft(logprobs), (1 - mu) * loss), _own(reported, expert)


def mix_chord(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    expert: Tensor,
    step: Tensor,
    *,
    mu_warmup_steps: Annotated[int, Ge(0)] = 0,
    mu_decay_steps: Annotated[int, Ge(0)] = 0,
    mu_peak: Share = 0.1,
    mu_valley: Share = 0.1,
    enable_phi_function: bool = True,
    cutoff_prob: Share = 1.0,
    clip_range: AtLeast0 = 0.2,
    clip_range_low: Annotated[float | None, Ge(0)] = None,
    clip_range_high: Annotated[float | None, Ge(0)] = None,
    clip_ratio_c: Annotated[float, Ge(1)] = 3.0,
    sft_loss_agg_mode: LossAggMode | None = None,
    grpo_loss_agg_mode: LossAggMode | None = None,
) -> Reported:
    """mix with a mu that rises to its peak and falls to its valley (CHORD, arXiv:2508.11408).

    With `enable_phi_function` an expert's token weighs p (1 - p).
    """
    schedule = {"mu_peak": mu_peak, "mu_valley": mu_valley}
    mu = chord_mu(int(step) + 1, mu_warmup_steps, mu_decay_steps, **schedule)
    loss, reported = ppo(
        logprobs,
        old_logprobs,
        advantages,
        clip_range=clip_range,
        clip_range_low=clip_range_low,
        clip_range_high=clip_range_high,
        clip_ratio_c=clip_ratio_c,
    )
    theirs = sft_phi(logprobs, cutoff_prob=cutoff_prob) if enable_phi_function else sft(logprobs)
    reported = _own(reported, expert) | {"mu": torch.full_like(logprobs.detach(), mu)}
    return torch.where(expert, mu * theirs, (1 - mu) * loss), reported


def chord_mu(
    step: int, warmup_steps: int, decay_steps: int, *, mu_peak: float, mu_valley: float
) -> float:
    """Linear from 0 to the peak, then half a cosine to the valley; `step` counts from 1."""
    if step < warmup_steps:
        return mu_peak * step / warmup_steps
    if step >= warmup_steps + decay_steps:
        return mu_valley
    done = (step - warmup_steps) / decay_steps
    return mu_valley + (mu_peak - mu_valley) * (1 + math.cos(math.pi * done)) / 2


def _own(reported: dict[str, Tensor], expert: Tensor) -> dict[str, Tensor]:
    return {name: values[~expert] for name, values in reported.items()}


def rollout_correction(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    sample_ids: Tensor,
    *,
    rollout_is: Level | None = None,
    rollout_is_threshold: Above0 = 2.0,
    rollout_rs: Level | None = None,
    rollout_rs_threshold: Above0 = 2.0,
    rollout_rs_threshold_lower: Annotated[float | None, Gt(0)] = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """w = min(p_trainer / p_sampler, C), and 0 outside [1 / T, T] (IMPALA, arXiv:1802.01561).

    The engine that samples and the trainer that learns never compute exactly the same
    probabilities. `rollout_is` weighs each token's policy loss by the ratio of the two, truncated
    (TIS); `rollout_rs` leaves out what lies outside a band (masked: MIS).

    token: the token's ratio; sequence: the product over its sample; geometric: the product's n-th
    root. C is `rollout_is_threshold`, T `rollout_rs_threshold`, 1 / T may be
    given as `rollout_rs_threshold_lower`.
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
    return weights, reported | {"weight": weights}


def sampler_measures(metrics: Mapping[str, float]) -> dict[str, float]:
    """Measures from the means that `rollout_correction` reports: the share of the tokens that is
    left as effective sample size, (mean w)^2 / mean w^2, and the perplexities of both sides.

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
    """p_trainer / p_sampler of each entry [M], at its level."""
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

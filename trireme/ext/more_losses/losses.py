"""Losses of single tokens, and a divergence; see algorithms/policy_loss.py for their form."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from trireme.algorithms.kl import LossAggMode
from trireme.algorithms.part import Above0, AtLeast0
from trireme.algorithms.policy_loss import (
    MAX_LOG_RATIO,
    Reported,
    idle_at_zero_advantage,
    log_ratio_of,
    of_own_tokens,
    ppo,
    selects,
    sft,
)
from trireme.config.options import Share


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


def second_moment_mask(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    m2_threshold: float = 0.04,
    log_ratio_clip: float = MAX_LOG_RATIO,
) -> Tensor:
    """Return True for the tokens that M2PO learns from: those with the largest |log r| are dropped
    until the mean of (log r)^2 is at most the threshold, both taken over the tokens that PPO's clip
    would affect (A > 0 and r > 1, A < 0 and r < 1).
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
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
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
    clip_ratio_c: Annotated[float, Gt(1)] = 3.0,
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
    reported = of_own_tokens(reported, expert) | {"mu": torch.full_like(logprobs.detach(), mu)}
    return torch.where(expert, mu * theirs, (1 - mu) * loss), reported


def chord_mu(
    step: int, warmup_steps: int, decay_steps: int, *, mu_peak: float, mu_valley: float
) -> float:
    """Rise linearly from 0 to the peak, then by half a cosine to the valley; `step` counts
    from 1.
    """
    if step < warmup_steps:
        return mu_peak * step / warmup_steps
    if step >= warmup_steps + decay_steps:
        return mu_valley
    done = (step - warmup_steps) / decay_steps
    return mu_valley + (mu_peak - mu_valley) * (1 + math.cos(math.pi * done)) / 2


def sdar(
    logprobs: Tensor, ref_logprobs: Tensor, *, gate_beta: Annotated[float, Gt(0)] = 5.0
) -> Tensor:
    """sg(sigmoid(b d)) d, d = log q - log p (SDAR, arXiv:2605.15155).

    A teacher counts where it is surer of the token than the policy. b is `gate_beta`.
    """
    difference = ref_logprobs - logprobs
    return (gate_beta * difference).sigmoid().detach() * difference


def discounted_ahead(values: Tensor, sample_ids: Tensor, positions: Tensor, decay: float) -> Tensor:
    """Return sum_k decay^(its distance) values [M] over each entry and the later ones of its
    sample; distances are those of `positions` [M].
    """
    total, step = values, 1
    longest = int(torch.bincount(sample_ids).max()) if len(values) else 0
    while step < longest:  # each pass doubles the reach of the sums
        distance = (positions[step:] - positions[:-step]).to(values)
        same = sample_ids[step:] == sample_ids[:-step]
        further = torch.where(same, decay**distance * total[step:], 0)
        total = total + torch.cat([further, values.new_zeros(step)])
        step *= 2
    return total

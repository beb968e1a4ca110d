"""Policy loss: what each trained token contributes before averaging.

Functions of flat tokens `(logprobs, old_logprobs, advantages, ..., *, options) -> loss [M]`, or a
pair of it and a dict of [M] tensors whose means are reported as `actor/<name>`. Masking and
averaging are not theirs. They may name any field of the batch (`batch.FIELD_NAMES`), `sample_ids`,
`positions`, `ref_logprobs`, `expert` (which tokens are an expert's) and `step` (train steps done).

Notation: r = p / p_old, sg(x) is x without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from trireme.algorithms.reduce import segment_mean

Loss = TypeVar("Loss", bound=Callable)
Reported = tuple[Tensor, dict[str, Tensor]]

# exp(20) is finite in float32; a ratio beyond it is a broken one.
MAX_LOG_RATIO = 20.0


def idle_at_zero_advantage(loss: Loss) -> Loss:
    """Decorator: says that the loss has no gradient where the advantage is 0, so that training may
    leave such samples out."""
    loss.idle_at_zero_advantage = True
    return loss


def log_ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log r, kept where its exponential is finite."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@idle_at_zero_advantage
def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sample_ids: Tensor | None = None,
    *,
    clip_range: float = 0.2,
    clip_range_low: float | None = None,
    clip_range_high: float | None = None,
    clip_ratio_c: float = 3.0,
    enable_sequence_masking: bool = False,
    delta: float = 0.1,
    fallback_to_policy_gradient: bool = False,
) -> Reported:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv:1707.06347).

    Where A < 0 it is at most -A c (dual clip, arXiv:1912.09729). `clip_range` stands for the low
    and the high one where they are not given; a higher high one is DAPO's (arXiv:2503.14476).
    `enable_sequence_masking` leaves out tokens with A < 0 of samples whose mean of -log r is above
    `delta`. `fallback_to_policy_gradient` takes p itself for p_old.
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
        far = segment_mean(-drift.detach(), sample_ids) > delta
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


def sft_phi(logprobs: Tensor, *, cutoff_prob: float = 1.0) -> Tensor:
    """-sg(p (1 - p)) log p: the tokens that are neither known nor hopeless (arXiv:2508.11408).

    Tokens with p above `cutoff_prob` weigh 0.
    """
    p = logprobs.detach().exp()
    return -(p * (1 - p) * (p <= cutoff_prob)) * logprobs


@idle_at_zero_advantage
def opmd(logprobs: Tensor, advantages: Tensor, *, tau: float = 1.0) -> Tensor:
    """-A log p / (1 + tau) (OPMD, arXiv:2505.17826)."""
    return -advantages * logprobs / (1 + tau)


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
    clip_range_low: float = 1.0,
    clip_range_high: float = 0.28,
    enable_mask_clip: bool = False,
    mask_clip_range_low: float = 1.0,
    mask_clip_range_high: float = 0.28,
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
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Tensor:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate in place of a clip (SAPO, arXiv:2511.20347).

    tau is `tau_pos` where A > 0, else `tau_neg`. The gradient is that of -A r at r = 1 and fades on
    both sides.
    """
    ratio = log_ratio_of(logprobs, old_logprobs).exp()
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    return -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))


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
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, epsilon: float = 0.3
) -> Reported:
    """-A log r where 1 / (1 + e) <= r <= 1 + e, else 0 (sPPO, arXiv:2108.05828)."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio_of(logprobs, old_logprobs).exp().detach()
    inside = (ratio >= 1 / (1 + epsilon)) & (ratio <= 1 + epsilon)
    return -advantages * log_ratio * inside, {"pg_clipfrac": (~inside).float()}

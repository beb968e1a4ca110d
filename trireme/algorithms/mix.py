"""Mix: losses over a policy's own rollouts and an expert's replies in one batch.

Experts' and own tokens are averaged each over their own kind (`Recipe.weights`), so that mu says
how the two weigh whatever their numbers are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trireme.algorithms.policy_loss import Reported, ppo, sft, sft_phi


def mix(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    expert: Tensor,
    *,
    mu: float = 0.1,
    clip_range: float = 0.2,
    clip_range_low: float | None = None,
    clip_range_high: float | None = None,
) -> Reported:
    """(1 - mu) PPO on own tokens, mu (-log p) on an expert's (arXiv:2505.17826)."""
    own, reported = ppo(
        logprobs,
        old_logprobs,
        advantages,
        clip_range=clip_range,
        clip_range_low=clip_range_low,
        clip_range_high=clip_range_high,
    )
    return torch.where(expert, mu * sft(logprobs), (1 - mu) * own), _own(reported, expert)


def mix_chord(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    expert: Tensor,
    step: Tensor,
    *,
    mu_warmup_steps: int = 0,
    mu_decay_steps: int = 0,
    mu_peak: float = 0.1,
    mu_valley: float = 0.1,
    enable_phi_function: bool = True,
    cutoff_prob: float = 1.0,
    clip_range: float = 0.2,
    clip_range_low: float | None = None,
    clip_range_high: float | None = None,
) -> Reported:
    """mix with a mu that rises to its peak and falls to its valley (CHORD, arXiv:2508.11408).

    With `enable_phi_function` an expert's token weighs p (1 - p).
    """
    mu = chord_mu(int(step), mu_warmup_steps, mu_decay_steps, mu_peak=mu_peak, mu_valley=mu_valley)
    own, reported = ppo(
        logprobs,
        old_logprobs,
        advantages,
        clip_range=clip_range,
        clip_range_low=clip_range_low,
        clip_range_high=clip_range_high,
    )
    theirs = sft_phi(logprobs, cutoff_prob=cutoff_prob) if enable_phi_function else sft(logprobs)
    reported = _own(reported, expert) | {"mu": torch.full_like(logprobs.detach(), mu)}
    return torch.where(expert, mu * theirs, (1 - mu) * own), reported


def chord_mu(
    step: int, warmup_steps: int, decay_steps: int, *, mu_peak: float, mu_valley: float
) -> float:
    """Linear from 0 to the peak, then half a cosine to the valley; `step` counts from 0."""
    if step < warmup_steps:
        return mu_peak * step / warmup_steps
    if step >= warmup_steps + decay_steps:
        return mu_valley
    done = (step - warmup_steps) / decay_steps
    return mu_valley + (mu_peak - mu_valley) * (1 + math.cos(math.pi * done)) / 2


def _own(reported: dict[str, Tensor], expert: Tensor) -> dict[str, Tensor]:
    """What is reported of own tokens alone."""
    return {name: values[~expert] for name, values in reported.items()}

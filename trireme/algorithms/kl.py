"""KL: estimates, per token, of how far the policy is from the reference model.

Functions `(logprobs [M], ref_logprobs [M]) -> [M]`; names and formulas after Schulman,
http://joschu.net/blog/kl-approx.html. As `kl_loss_fn`, `kl_coef` (0.001 by default) times it is
added to the loss; as `kl_penalty_fn` that is taken off the token rewards. With `adaptive` the
coefficient follows the divergence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def none(logprobs: Tensor) -> Tensor:
    """0: no reference model is loaded."""
    return torch.zeros_like(logprobs)


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased in value, may be negative."""
    return logprobs - ref_logprobs


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log p - log q|"""
    return (logprobs - ref_logprobs).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: its gradient is that of the KL divergence on on-policy tokens."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - 1 - d with d = log q - log p: unbiased in value and never negative."""
    difference = ref_logprobs - logprobs
    return difference.exp() - 1 - difference


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 with d kept within +-20 and the result within +-10."""
    difference = (ref_logprobs - logprobs).clamp(-20, 20)
    return (difference.exp() - 1 - difference).clamp(-10, 10)


def corrected_k3(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None
) -> Tensor:
    """min(p / p_old, 2) k3: k3 of tokens that older weights sampled."""
    estimate = k3(logprobs, ref_logprobs)
    if old_logprobs is None:
        return estimate
    return (logprobs - old_logprobs).exp().clamp(0, 2) * estimate


def adapted(
    coefficient: float, divergence: float, count: int, *, target_kl: float, horizon: float
) -> float:
    """c (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon): follows a target (arXiv:1909.08593).

    `count` is n, the experiences of the train step.
    """
    error = min(max(divergence / target_kl - 1, -0.2), 0.2)
    return coefficient * (1 + error * count / horizon)

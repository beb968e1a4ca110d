"""KL: computes KL penalties and entropy bonuses, and the token weights that average a loss.

- Estimates, per token, of how far the policy is from the reference model: functions `(logprobs [M],
  ref_logprobs [M]) -> [M]`; names and formulas after Schulman,
  http://joschu.net/blog/kl-approx.html. As `kl_loss_fn`, `kl_coef` (0.001 by default) times it is
  added to the loss; as `kl_penalty_fn` that is taken off the rewards. With `adaptive` the
  coefficient follows the divergence of a token, on average.
- The bonus, per token, for a policy with high entropy: functions `(entropies [M]) -> [M]`;
  `entropy_coef` (0 by default) times it is subtracted from the loss. If the coefficient is 0 the
  exact entropy is not computed.
- The loss is sum_m weights[m] * loss[m] with weights of the whole train batch, so that it does not
  depend on how the batch is cut into micro-batches.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from trireme.extensions import former_names

LossAggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
LOSS_AGG_MODES = get_args(LossAggMode)
_EPSILON = 1e-8
TIE = 1e-5
"""Nats by which equal entropies may differ, computed in float32 by other kernels or in another
cut."""


def no_kl(logprobs: Tensor) -> Tensor:
    """0: no reference model is loaded."""
    return torch.zeros_like(logprobs)


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased in value, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: its gradient is that of the KL divergence on on-policy tokens."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - 1 - d with d = log q - log p: unbiased in value and never negative."""
    difference = ref_logprobs - logprobs
    return difference.exp() - 1 - difference


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 with d clamped to +-20 and the result to +-10."""
    difference = (ref_logprobs - logprobs).clamp(-20, 20)
    return (difference.exp() - 1 - difference).clamp(-10, 10)


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log p - log q|"""
    return (logprobs - ref_logprobs).abs()


def corrected_k3(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None
) -> Tensor:
    """min(p / p_old, 2) k3: k3 of tokens that older weights sampled."""
    estimate = k3(logprobs, ref_logprobs)
    if old_logprobs is None:
        return estimate
    # clamped before the exponential, whose gradient would be NaN where it is infinite
    return (logprobs - old_logprobs).clamp(max=math.log(2)).exp() * estimate


def adapted(
    coefficient: float, divergence: float, count: int, *, target_kl: float, horizon: float
) -> float:
    """c (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon): follows a target (arXiv:1909.08593).

    `count` is n, the experiences of the train step. If n is more than 4 horizons, a step leaves a
    fifth of c: a coefficient below 0 would drive the policy away from the reference.
    """
    error = min(max(divergence / target_kl - 1, -0.2), 0.2)
    return coefficient * max(1 + error * count / horizon, 0.2)


def no_entropy(logprobs: Tensor) -> Tensor:
    """0: no bonus."""
    return torch.zeros_like(logprobs)


def entropy(entropies: Tensor) -> Tensor:
    """-sum_v p(v) log p(v) of each trained token's distribution (A3C, arXiv:1602.01783)."""
    return entropies


def own_entropy(entropies: Tensor, expert: Tensor) -> Tensor:
    """-sum_v p(v) log p(v) on the policy's own tokens, 0 on an expert's."""
    return entropies * ~expert


def segment_sum(values: Tensor, sample_ids: Tensor) -> Tensor:
    """Sum `values` [M] over the sample of each entry [M]."""
    num = int(sample_ids.max()) + 1 if len(sample_ids) else 0
    return values.new_zeros(num).index_add(0, sample_ids, values)[sample_ids]


def top_entropy(entropies: Tensor, share: float) -> Tensor:
    """Return True for the `share` of tokens [M] with the highest entropy, at least one.

    Tokens within TIE of the last one count too: equal contexts, such as those of a group's first
    tokens, have entropies that differ only by rounding, and otherwise kernels and the batch's cut
    would decide.
    """
    chosen = math.ceil(share * len(entropies))
    return entropies >= entropies.kthvalue(len(entropies) - chosen + 1).values - TIE


def segment_mean(values: Tensor, sample_ids: Tensor) -> Tensor:
    """Average `values` [M] over the entries of each entry's sample [M]."""
    return segment_sum(values, sample_ids) / segment_sum(torch.ones_like(values), sample_ids)


def weights(mode: str, sample_ids: Tensor, num_samples: int, *, width: int) -> Tensor:
    """Return the weight of each trained token [M], by its sample's number [M]; `width`: the longest
    response.

    token-mean: 1 / M. seq-mean-token-sum: 1 / N. seq-mean-token-mean: 1 / (N * tokens of the
    sample). seq-mean-token-sum-norm: 1 / width (arXiv:2503.20783). A sample without trained tokens
    counts in N.
    """
    if mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"algorithm.loss_agg_mode is '{mode}': expected one of {', '.join(LOSS_AGG_MODES)}"
        )
    num_tokens = len(sample_ids)
    alike = {
        "token-mean": 1 / (num_tokens + _EPSILON),
        "seq-mean-token-sum": 1 / max(num_samples, 1),
        "seq-mean-token-sum-norm": 1 / (width + _EPSILON),
    }
    if mode in alike:
        return torch.full((num_tokens,), alike[mode], dtype=torch.float32)
    counts = torch.bincount(sample_ids, minlength=num_samples).double()
    return (1 / (max(num_samples, 1) * (counts.index_select(0, sample_ids) + _EPSILON))).float()


__getattr__ = former_names(__name__)

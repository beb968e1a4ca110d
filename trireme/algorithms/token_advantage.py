"""Token advantage: computes advantages of single tokens, in the trainer (GAE, reinforce++).

Functions of flat tokens `(token_rewards, values, ..., sample_ids, *, options)` that return the
advantages [M], or a pair of them and the returns [M] that a critic learns. Marked `in_trainer`.
Data they may name: `token_rewards` [M], the reward on a sample's last trained token unless the
workflow gave one a token, less the KL penalty; `values`, a critic's; `old_logprobs`,
`ref_logprobs`, `teacher_logprobs`; `sample_ids`; `step`, the number of train steps before this one;
`entropies`, the policy's own, and with them by the same weights `logprobs` and
`mean_discriminators`; `advantages`, where the function starts from those of groups
(`starting_from`). Tokens that are not trained (prompts, replies of an environment) are skipped: the
next token is the next trained one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from trireme.algorithms.part import AtLeast0
from trireme.config.options import Share
from trireme.extensions import former_names

Advantage = TypeVar("Advantage", bound=Callable)


def in_trainer(function: Advantage) -> Advantage:
    """Mark an advantage as one of tokens, computed by the trainer."""
    function.in_trainer = True
    return function


@in_trainer
def gae(
    token_rewards: Tensor,
    values: Tensor,
    sample_ids: Tensor,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
) -> tuple[Tensor, Tensor]:
    """A_t = sum_k (gamma lam)^k (r + gamma V_next - V), whitened (GAE, arXiv:1506.02438).

    The critic learns the returns A + V, taken before A is whitened over the batch.
    """
    rewards, inside = _rows(token_rewards, sample_ids)
    value, _ = _rows(values, sample_ids)
    out = torch.zeros_like(rewards)
    ahead = rewards.new_zeros(len(rewards))
    following = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - value[:, t]
        ahead = torch.where(inside[:, t], delta + gamma * lam * ahead, ahead)
        following = torch.where(inside[:, t], value[:, t], following)
        out[:, t] = ahead
    advantages = out[inside]
    return whiten(advantages), advantages + values


@in_trainer
def reinforceplusplus(
    token_rewards: Tensor, sample_ids: Tensor, *, gamma: Share = 1.0
) -> tuple[Tensor, Tensor]:
    """A_t = whitened sum_k gamma^k r_{t+k} over the batch (REINFORCE++, arXiv:2501.03262)."""
    rewards, inside = _rows(token_rewards, sample_ids)
    out = torch.zeros_like(rewards)
    ahead = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        ahead = torch.where(inside[:, t], rewards[:, t] + gamma * ahead, ahead)
        out[:, t] = ahead
    returns = out[inside]
    return whiten(returns), returns


@in_trainer
def on_policy_distill(
    teacher_logprobs: Tensor, old_logprobs: Tensor, *, kl_coef: AtLeast0 = 1.0
) -> Tensor:
    """A_t = c (log p_teacher - log p): minus the reverse KL, token by token (arXiv:2306.13649)."""
    return kl_coef * (teacher_logprobs - old_logprobs)


def whiten(values: Tensor) -> Tensor:
    """Return (v - mean) / sqrt(var + 1e-8), var the unbiased one; a single value becomes 0.

    In float64, in which equal values do not differ from their mean.
    """
    exact = values.double()
    variance = exact.var() if len(exact) > 1 else exact.new_zeros(())
    return ((exact - exact.mean()) * (variance + 1e-8).rsqrt()).to(values.dtype)


def _rows(values: Tensor, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return one row per sample [N, T], padded with zeros, and a mask of the real values."""
    counts = torch.bincount(sample_ids)
    inside = torch.arange(int(counts.max()), device=values.device) < counts[:, None]
    out = values.new_zeros(inside.shape)
    out[inside] = values
    return out, inside


def starting_from(groups: Callable[..., Tensor]) -> Callable[[Advantage], Advantage]:
    """Make a decorator: `advantages` are those of `groups`, whose options the function
    takes too.
    """

    def mark(function: Advantage) -> Advantage:
        function.starts_from = groups
        return function

    return mark


__getattr__ = former_names(__name__)

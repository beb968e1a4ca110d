"""Token advantage: advantages of single tokens, computed in the trainer.

Functions of flat tokens `(token_rewards, values, ..., sample_ids, *, options)` that return the
advantages [M], or a pair of them and the returns [M] that a critic learns. Marked `in_trainer`.
Data they may name: `token_rewards` [M], the reward on a sample's last trained token unless the
workflow gave one a token, less the KL penalty; `values`, a critic's; `old_logprobs`,
`ref_logprobs`, `teacher_logprobs`; `sample_ids`; `entropies`, the policy's own, and with them by
the same weights `logprobs` and `mean_discriminators` (entropy_clip.py); `advantages`, where the
function starts from those of groups (entropy_clip.py). Tokens that are not trained (prompts, what
an environment said) are passed over: the next token is the next trained one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from trireme.algorithms.policy_loss import MAX_LOG_RATIO

Advantage = TypeVar("Advantage", bound=Callable)


def in_trainer(function: Advantage) -> Advantage:
    """Decorator: says that the advantage is one of tokens, computed by the trainer."""
    function.in_trainer = True
    return function


@in_trainer
def gae(
    token_rewards: Tensor,
    values: Tensor,
    sample_ids: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
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
    token_rewards: Tensor, sample_ids: Tensor, *, gamma: float = 1.0
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
    teacher_logprobs: Tensor, old_logprobs: Tensor, *, kl_coef: float = 1.0
) -> Tensor:
    """A_t = c (log p_teacher - log p): minus the reverse KL, token by token (arXiv:2306.13649)."""
    return kl_coef * (teacher_logprobs - old_logprobs)


@in_trainer
def jsd(
    teacher_logprobs: Tensor,
    old_logprobs: Tensor,
    *,
    kl_coef: float = 1.0,
    lambda_coef: float = 0.5,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """A_t = c (1 - b)(M - s), M = log((1 - b) e^s + b e^t): minus JSD's slope (arXiv:2306.13649).

    It is the gradient of the Jensen-Shannon divergence on the student's own samples: s and t
    are the student's and the teacher's log-probabilities of the token over `temperature`, b is
    `lambda_coef`. b = 0 is the reverse KL, A = c (t - s); b = 1 the forward one, A =
    c (e^(t - s) - 1). Trinity's A = -c (b (t - M) + (1 - b) (s - M)) is positive wherever the two
    differ, and leads the student away from its teacher. `chunk_size` tokens are computed at once;
    not given: all.
    """
    b, size = lambda_coef, chunk_size or max(len(old_logprobs), 1)
    if not 0 <= b <= 1:
        raise ValueError(f"algorithm.advantage_fn_args.lambda_coef is {b:g}: expected 0 to 1")
    chunks = zip(old_logprobs.split(size), teacher_logprobs.split(size), strict=True)
    return kl_coef * torch.cat([_between(s / temperature, t / temperature, b) for s, t in chunks])


def _between(student: Tensor, teacher: Tensor, b: float) -> Tensor:
    """The advantage of `jsd` at c = 1."""
    gap = (teacher - student).clamp(max=MAX_LOG_RATIO)
    if b == 0:
        return gap
    if b == 1:
        return gap.expm1()
    return (1 - b) * torch.log1p(b * gap.expm1())


def whiten(values: Tensor) -> Tensor:
    """(v - mean) / sqrt(var + 1e-8), var the unbiased one; a lone value becomes 0."""
    variance = values.var() if len(values) > 1 else values.new_zeros(())
    return (values - values.mean()) * (variance + 1e-8).rsqrt()


def _rows(values: Tensor, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
    """A row a sample [N, T], zeros behind, and which places hold a value."""
    counts = torch.bincount(sample_ids)
    inside = torch.arange(int(counts.max()), device=values.device) < counts[:, None]
    out = values.new_zeros(inside.shape)
    out[inside] = values
    return out, inside

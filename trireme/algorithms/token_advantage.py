"""Token advantage: computes advantages of single tokens, in the trainer (GAE, reinforce++).

Functions of flat tokens `(token_rewards, values, ..., sample_ids, *, options)` that return the
advantages [M], or a pair of them and the returns [M] that a critic learns. Marked `in_trainer`.
Data they may name: `token_rewards` [M], the reward on a sample's last trained token unless the
workflow gave one a token, less the KL penalty; `values`, a critic's; `old_logprobs`,
`ref_logprobs`, `teacher_logprobs`; `sample_ids`; `step`, how many train steps were done before this
one; `entropies`, the policy's own, and with them by the same weights `logprobs` and
`mean_discriminators`; `advantages`, where the function starts from those of groups
(`starting_from`). Tokens that are not trained (prompts, what an environment said) are passed over:
the next token is the next trained one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from trireme.algorithms.advantage import grpo
from trireme.algorithms.part import Above0, AtLeast0
from trireme.algorithms.policy_loss import MAX_LOG_RATIO
from trireme.config.options import Share

Advantage = TypeVar("Advantage", bound=Callable)

# Below it all tokens are alike but for rounding.
_NO_SPREAD = 1e-12


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


@in_trainer
def jsd(
    teacher_logprobs: Tensor,
    old_logprobs: Tensor,
    *,
    kl_coef: AtLeast0 = 1.0,
    lambda_coef: Share = 0.5,
    temperature: Above0 = 1.0,
    chunk_size: Annotated[int | None, Gt(0)] = None,
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


def starting_from(groups: Callable[..., Tensor]) -> Callable[[Advantage], Advantage]:
    """Decorator: `advantages` are those of `groups`, whose options the function has too."""

    def mark(function: Advantage) -> Advantage:
        function.starts_from = groups
        return function

    return mark


@in_trainer
@starting_from(grpo)
def clipb(advantages: Tensor, logprobs: Tensor, entropies: Tensor, *, mu: AtLeast0 = 2.5) -> Tensor:
    """GRPO's A, but 0 where A < 0 and S - mean < -mu std, S = p (H + log p) (arXiv:2602.03392).

    H is the entropy where the token was sampled. To first order, raising a token's logit by e
    changes H by -e S: pushing down one with a low S lowers the entropy. Mean and std (of the
    population) are of all trained tokens of the batch. Tokens that are left out count in averages.
    Options of `grpo` count too.
    """
    discriminator = logprobs.exp() * (entropies + logprobs)
    spread = discriminator.std(correction=0)
    if spread < _NO_SPREAD:
        return advantages
    clipped = (advantages < 0) & (discriminator - discriminator.mean() < -mu * spread)
    return advantages * ~clipped


@in_trainer
@starting_from(grpo)
def clipv(
    advantages: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
    mean_discriminators: Tensor,
    *,
    mu: AtLeast0 = 8.5,
    max_frac: Above0 = 1e-4,
) -> Tensor:
    """GRPO's A, but 0 where A < 0 and S - E[S] < -mu std, S = p (H + log p) (arXiv:2602.03392).

    As `clipb`, with S compared to its mean E[S] over the vocabulary under the policy: what a step
    of the policy gradient changes the entropy by, to first order. Std (of the population) is of
    S - E[S] over all trained tokens of the batch. At most the share `max_frac` of them is left out,
    and one at least: those with the lowest.
    """
    difference = logprobs.exp() * (entropies + logprobs) - mean_discriminators
    spread = difference.std(correction=0)
    if spread < _NO_SPREAD:
        return advantages
    clipped = (advantages < 0) & (difference < -mu * spread)
    lowest = torch.where(clipped, difference, torch.inf).argsort()
    out = advantages.clone()
    out[lowest[: min(int(clipped.sum()), max(int(max_frac * len(advantages)), 1))]] = 0
    return out


@in_trainer
@starting_from(grpo)
def rlsd(
    advantages: Tensor,
    teacher_logprobs: Tensor,
    old_logprobs: Tensor,
    step: Tensor,
    *,
    lam: Share = 0.5,
    weight_clip: AtLeast0 = 0.2,
    lam_warmup_steps: Annotated[int, Ge(0)] = 0,
    lam_decay_steps: Annotated[int, Ge(0)] = 0,
    negative_only: bool = False,
) -> Tensor:
    """GRPO's A times 1 - l + l clip(e^(sign(A) d), 1 - c, 1 + c) (RLSD, arXiv:2604.03128).

    d is log p_teacher - log p: a teacher says which tokens earned the advantage, and never turns
    its sign. c is `weight_clip`. l rises from 0 to `lam` over the warm-up's train steps, and falls
    back to 0 over the decay's, where there are any. `negative_only` leaves A > 0 as
    it is. Options of `grpo` count too.
    """
    done, share = int(step), lam
    if done < lam_warmup_steps:
        share = lam * done / lam_warmup_steps
    elif lam_decay_steps:
        share = lam * max(1 - (done - lam_warmup_steps) / lam_decay_steps, 0)
    gap = (teacher_logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    evidence = (advantages.sign() * gap).exp().clamp(1 - weight_clip, 1 + weight_clip)
    weighed = advantages * (1 - share + share * evidence)
    return torch.where(advantages > 0, advantages, weighed) if negative_only else weighed

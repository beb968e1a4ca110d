"""Advantages of single tokens; see algorithms/token_advantage.py for their form."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from trireme.algorithms.advantage import grpo
from trireme.algorithms.part import Above0, AtLeast0
from trireme.algorithms.policy_loss import MAX_LOG_RATIO
from trireme.algorithms.token_advantage import in_trainer, starting_from
from trireme.config.options import Share

# Below this spread all tokens are equal up to rounding.
_NO_SPREAD = 1e-12


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
    """Return the advantage of `jsd` at c = 1."""
    gap = (teacher - student).clamp(max=MAX_LOG_RATIO)
    if b == 0:
        return gap
    if b == 1:
        return gap.expm1()
    return (1 - b) * torch.log1p(b * gap.expm1())


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

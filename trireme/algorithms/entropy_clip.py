"""Entropy clip: takes the advantage from tokens whose punishment would cost the most entropy."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trireme.algorithms.advantage import grpo
from trireme.algorithms.token_advantage import Advantage, in_trainer

# Below it all tokens are alike but for rounding.
_NO_SPREAD = 1e-12


def starting_from(groups: Callable[..., Tensor]) -> Callable[[Advantage], Advantage]:
    """Decorator: `advantages` are those of `groups`, whose options the function has too."""

    def mark(function: Advantage) -> Advantage:
        function.starts_from = groups
        return function

    return mark


@in_trainer
@starting_from(grpo)
def clipb(advantages: Tensor, logprobs: Tensor, entropies: Tensor, *, mu: float = 2.5) -> Tensor:
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
    mu: float = 8.5,
    max_frac: float = 1e-4,
) -> Tensor:
    """GRPO's A, but 0 where A < 0 and S - E[S] < -mu std, S = p (H + log p) (arXiv:2602.03392).

    As `clipb`, with S compared to its mean E[S] over the vocabulary under the policy: what a step
    of the policy gradient changes the entropy by, to first order. Std (of the population) is of
    S - E[S] over all trained tokens of the batch. Of more than ceil(`max_frac` tokens) those with
    the lowest are left out.
    """
    difference = logprobs.exp() * (entropies + logprobs) - mean_discriminators
    spread = difference.std(correction=0)
    if spread < _NO_SPREAD:
        return advantages
    clipped = (advantages < 0) & (difference < -mu * spread)
    lowest = torch.where(clipped, difference, torch.inf).argsort()
    out = advantages.clone()
    out[lowest[: min(int(clipped.sum()), math.ceil(max_frac * len(advantages)))]] = 0
    return out

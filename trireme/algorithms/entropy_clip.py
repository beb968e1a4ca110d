"""Entropy clip: takes the advantage from tokens whose punishment would cost the most entropy."""

from __future__ import annotations

from collections.abc import Callable

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

"""Entropy: the bonus, per token, for a policy that keeps its options open.

Functions `(entropies [M]) -> [M]`; `entropy_coef` (0 by default) times it is subtracted from the
loss. Where the coefficient is 0 the exact entropy is not computed at all.
"""

from __future__ import annotations

import torch
from torch import Tensor


def none(logprobs: Tensor) -> Tensor:
    """0: no bonus."""
    return torch.zeros_like(logprobs)


def default(entropies: Tensor) -> Tensor:
    """-sum_v p(v) log p(v) of each trained token's distribution (A3C, arXiv:1602.01783)."""
    return entropies


def mix(entropies: Tensor, expert: Tensor) -> Tensor:
    """-sum_v p(v) log p(v) on the policy's own tokens, 0 on an expert's."""
    return entropies * ~expert

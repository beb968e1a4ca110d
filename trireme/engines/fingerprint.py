"""Fingerprint: one number for each weight tensor, by which a copy is told from what it should be.

Exact, where scores are not: a train step of a small learning rate changes log-probabilities less
than another order of the same sums does, but it changes the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SAMPLES = 1024
"""Numbers looked at in a tensor, evenly spread: a train step changes nearly all."""


def fingerprint(weights: Mapping[str, Tensor], dtype: str) -> dict[str, float]:
    """A sum in which every sampled place counts differently, of the numbers as `dtype` has them."""
    out = {}
    for name, tensor in weights.items():
        stride = max(tensor.numel() // SAMPLES, 1) | 1  # odd: it walks through all columns
        sample = tensor.detach().reshape(-1)[::stride]
        values = sample.to(getattr(torch, dtype)).cpu().double()
        out[name] = float((values * torch.arange(1, len(values) + 1)).sum())
    return out


def refuse_unusable(weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError, naming it, for a tensor that no model can compute with."""
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise ValueError(f"weight '{name}' is of {tensor.dtype}: expected floating point")
        wide = tensor.float() if tensor.itemsize == 1 else tensor
        if not bool(torch.isfinite(wide).all()):
            raise ValueError(f"weight '{name}' holds NaN or an infinite number")

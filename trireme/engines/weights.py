"""Weights: how an engine's tensors are proved, and which ones no engine takes.

A fingerprint, one number for each tensor, tells a right copy from a wrong one. It is exact, where
scores are not: a train step of a small learning rate changes log-probabilities less than another
order of the same sums does, but it changes the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SAMPLES = 1024
"""Numbers sampled from a tensor, evenly spread: a train step changes nearly all."""


def fingerprint(weights: Mapping[str, Tensor], dtype: str) -> dict[str, float]:
    """Compute a position-weighted sum of the sampled numbers, converted to `dtype`."""
    out = {}
    for name, tensor in weights.items():
        stride = max(tensor.numel() // SAMPLES, 1) | 1  # odd: it walks through all columns
        sample = tensor.detach().reshape(-1)[::stride]
        values = sample.to(getattr(torch, dtype)).cpu().double()
        out[name] = float((values * torch.arange(1, len(values) + 1)).sum())
    return out


def refuse_unusable(weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError, which names it, for a tensor that no model can compute with."""
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise ValueError(f"weight '{name}' is of {tensor.dtype}: expected floating point")
        wide = tensor.float() if tensor.itemsize == 1 else tensor
        if not bool(torch.isfinite(wide).all()):
            raise ValueError(f"weight '{name}' holds NaN or an infinite number")


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype of `float32` or `torch.float32`."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype '{name}' is not known: expected float32, bfloat16 and so on")
    return dtype

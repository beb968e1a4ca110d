"""Reduce: the one place that turns a loss per token into a loss.

The loss is sum_m weights[m] * loss[m] with weights of the whole train batch, so that it does not
depend on how the batch is cut into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.algorithms.names import LOSS_AGG_MODES

_EPSILON = 1e-8


def segment_sum(values: Tensor, sample_ids: Tensor) -> Tensor:
    """Of each entry [M] the sum of `values` [M] over its sample."""
    num = int(sample_ids.max()) + 1 if len(sample_ids) else 0
    return values.new_zeros(num).index_add(0, sample_ids, values)[sample_ids]


def segment_mean(values: Tensor, sample_ids: Tensor) -> Tensor:
    """Of each entry [M] the mean of `values` [M] over its sample's entries."""
    return segment_sum(values, sample_ids) / segment_sum(torch.ones_like(values), sample_ids)


def weights(mode: str, sample_ids: Tensor, num_samples: int, *, width: int) -> Tensor:
    """Of each trained token, [M], by its sample's number [M]; `width`: the longest response.

    token-mean: 1 / M. seq-mean-token-sum: 1 / N. seq-mean-token-mean: 1 / (N * tokens of the
    sample). seq-mean-token-sum-norm: 1 / width (arXiv:2503.20783). A sample without trained tokens
    counts in N.
    """
    if mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"algorithm.loss_agg_mode is '{mode}': expected one of {', '.join(LOSS_AGG_MODES)}"
        )
    num_tokens = len(sample_ids)
    if mode == "token-mean":
        return torch.full((num_tokens,), 1 / (num_tokens + _EPSILON))
    if mode == "seq-mean-token-sum":
        return torch.full((num_tokens,), 1 / max(num_samples, 1))
    if mode == "seq-mean-token-sum-norm":
        return torch.full((num_tokens,), 1 / (width + _EPSILON))
    counts = torch.bincount(sample_ids, minlength=num_samples).double()
    return (1 / (max(num_samples, 1) * (counts[sample_ids] + _EPSILON))).float()

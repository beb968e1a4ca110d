"""Correction: weighs tokens by how far trainer and sampler are apart (`rollout_correction`).

The engine that samples and the trainer that learns never compute exactly the same probabilities.
`rollout_is` weighs each token's policy loss by the ratio of the two, truncated (TIS); `rollout_rs`
leaves out what lies outside a band (masked: MIS). Each on tokens, or on whole samples.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trireme.algorithms.policy_loss import MAX_LOG_RATIO
from trireme.algorithms.reduce import segment_mean, segment_sum

Level = Literal["token", "sequence", "geometric"]


def rollout_correction(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    sample_ids: Tensor,
    *,
    rollout_is: Literal["token", "sequence"] | None = None,
    rollout_is_threshold: float = 2.0,
    rollout_rs: Level | None = None,
    rollout_rs_threshold: float = 2.0,
    rollout_rs_threshold_lower: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """w = min(p_trainer / p_sampler, C), and 0 outside [1 / T, T] (IMPALA, arXiv:1802.01561).

    token: the token's ratio; sequence: the product over its sample; geometric (`rollout_rs` only):
    the product's n-th root. C is `rollout_is_threshold`, T `rollout_rs_threshold`, 1 / T may be
    given as `rollout_rs_threshold_lower`.
    """
    differences = logprobs.detach() - sampler_logprobs
    weights = torch.ones_like(differences)
    reported: dict[str, Tensor] = {}
    if rollout_is is not None:
        ratio = _ratio("rollout_is", rollout_is, differences, sample_ids)
        weights = ratio.clamp(max=rollout_is_threshold)
        reported["truncated"] = (ratio > rollout_is_threshold).float()
    if rollout_rs is not None:
        lower = rollout_rs_threshold_lower
        lower = 1 / rollout_rs_threshold if lower is None else lower
        ratio = _ratio("rollout_rs", rollout_rs, differences, sample_ids)
        outside = (ratio < lower) | (ratio > rollout_rs_threshold)
        weights = weights * ~outside
        reported["masked"] = outside.float()
    return weights, reported | {"weight": weights}


def _ratio(option: str, level: str, differences: Tensor, sample_ids: Tensor) -> Tensor:
    """p_trainer / p_sampler of each entry [M], at its level."""
    levels = {
        "token": lambda: differences,
        "sequence": lambda: segment_sum(differences, sample_ids),
        "geometric": lambda: segment_mean(differences, sample_ids),
    }
    if level not in levels or (option == "rollout_is" and level == "geometric"):
        known = [name for name in levels if option != "rollout_is" or name != "geometric"]
        raise ValueError(
            f"algorithm.rollout_correction.{option} is '{level}': expected one of "
            f"{', '.join(known)}"
        )
    return levels[level]().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

"""Sequence loss: losses over whole samples (gspo, kto), or pairs of them (dpo).

Each token gets the loss of its sample, so that `seq-mean-token-mean` gives the mean over samples.
Such a loss is one of all tokens of a sample alike: loss weights other than 0 and 1 are refused.
See policy_loss.py for the form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from trireme.algorithms.kl import segment_mean, segment_sum
from trireme.algorithms.part import Above0, AtLeast0
from trireme.algorithms.policy_loss import (
    MAX_LOG_RATIO,
    Reported,
    idle_at_zero_advantage,
)
from trireme.extensions import former_names

Loss = TypeVar("Loss", bound=Callable)


def of_sequences(loss: Loss) -> Loss:
    """Mark a loss as one of whole samples."""
    loss.of_sequences = True
    return loss


def of_groups(loss: Loss) -> Loss:
    """Decorator: says that the loss is one of groups of whole samples."""
    loss.of_groups = True
    return of_sequences(loss)


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, sample_ids: Tensor) -> Tensor:
    """Return log s = mean of log r over the sample, with the gradient of each token's own log p."""
    mean = segment_mean(logprobs.detach() - old_logprobs, sample_ids)
    return (logprobs - logprobs.detach() + mean).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@of_sequences
@idle_at_zero_advantage
def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sample_ids: Tensor,
    *,
    clip_range: Annotated[float | None, Ge(0)] = None,
    clip_range_low: Annotated[float | None, Ge(0)] = None,
    clip_range_high: Annotated[float | None, Ge(0)] = None,
) -> Reported:
    """max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean log r) (GSPO, arXiv:2507.18071).

    low is `clip_range_low`, not given: `clip_range`, without either 0.0003; high is
    `clip_range_high`, else `clip_range`, else 0.0004.
    """
    low, high = (3e-4, 4e-4) if clip_range is None else (clip_range, clip_range)
    low = low if clip_range_low is None else clip_range_low
    high = high if clip_range_high is None else clip_range_high
    ratio = sequence_log_ratio(logprobs, old_logprobs, sample_ids).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    reported = {
        "pg_clipfrac": (clipped > plain).float(),
        "ppo_kl": (old_logprobs - logprobs).detach(),
    }
    return torch.maximum(plain, clipped), reported


@of_sequences
def dpo(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    pair_ids: Tensor,
    chosen: Tensor,
    *,
    beta: Above0 = 0.1,
    label_smoothing: Annotated[float, Ge(0), Le(0.5)] = 0.0,
    rpo_alpha: AtLeast0 = 0.0,
) -> Reported:
    """-(1 - e) log sigmoid(b D) - e log sigmoid(-b D), a pair at a time (DPO, arXiv:2305.18290).

    D is sum log(p / p_ref) over the chosen reply's tokens less the same over the rejected one's; b
    is `beta`, e `label_smoothing`. `rpo_alpha` times the mean of -log p over the chosen reply's
    tokens is added (RPO, arXiv:2404.19733).
    """
    gains = logprobs - ref_logprobs
    pairs, pair_index = pair_ids.unique(return_inverse=True)
    zeros = gains.new_zeros(len(pairs))
    won = zeros.index_add(0, pair_index, gains * chosen)
    lost = zeros.index_add(0, pair_index, gains * ~chosen)
    margin = beta * (won - lost)
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    if rpo_alpha:
        logprob_sums = zeros.index_add(0, pair_index, logprobs * chosen)
        lengths = zeros.index_add(0, pair_index, chosen.to(gains.dtype))
        loss = loss - rpo_alpha * logprob_sums / lengths
    reported = {
        "dpo_accuracy": (margin.detach() > 0).float(),
        "dpo_margin": margin.detach(),
        "dpo_reward_chosen": beta * won.detach(),
        "dpo_reward_rejected": beta * lost.detach(),
    }
    return loss[pair_index], reported


@of_sequences
def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    sample_ids: Tensor,
    desirable: Tensor,
    reference_point: Tensor,
    *,
    beta: Above0 = 0.1,
    desirable_weight: Above0 = 1.0,
    undesirable_weight: Above0 = 1.0,
) -> Reported:
    """w (1 - sigmoid(b (R - z))) if desirable, else w (1 - sigmoid(b (z - R))) (arXiv:2402.01306).

    R is sum log(p / p_ref) over the reply's tokens. z, the reference point, is the mean R of the
    batch's prompts with replies to other prompts, at least 0 and without a gradient. b is `beta`, w
    `desirable_weight` or `undesirable_weight`.
    """
    gains = segment_sum(logprobs - ref_logprobs, sample_ids)
    sign = torch.full_like(gains, -1.0).masked_fill(desirable, 1.0)
    weight = torch.full_like(gains, undesirable_weight).masked_fill(desirable, desirable_weight)
    loss = weight * torch.sigmoid(-beta * sign * (gains - reference_point))
    first = sample_ids.diff(prepend=sample_ids.new_tensor([-1])) != 0  # one entry of each reply
    rewards = beta * gains.detach()
    reported = {
        "kto_reference_point": reference_point,
        "kto_reward_desirable": rewards[first & desirable],
        "kto_reward_undesirable": rewards[first & ~desirable],
    }
    return loss, reported


__getattr__ = former_names(__name__)

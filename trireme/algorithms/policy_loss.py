"""Policy loss: what each trained token contributes before averaging.

Functions of flat tokens `(logprobs, old_logprobs, advantages, ..., *, options) -> loss [M]`, or a
pair of it and a dict of [M] tensors whose means are reported as `actor/<name>`. Masking and
averaging are not theirs. They may name any field of the batch (`batch.FIELD_NAMES`), `sample_ids`,
`positions`, `ref_logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Loss = TypeVar("Loss", bound=Callable)

# exp(20) is finite in float32; a ratio beyond it is a broken one.
_MAX_LOG_RATIO = 20.0


def idle_at_zero_advantage(loss: Loss) -> Loss:
    """Decorator: says that the loss has no gradient where the advantage is 0, so that training may
    leave such samples out."""
    loss.idle_at_zero_advantage = True
    return loss


@idle_at_zero_advantage
def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_range: float = 0.2,
    clip_range_low: float | None = None,
    clip_range_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = p / p_old (PPO, arXiv:1707.06347).

    Where A < 0 it is at most -A c (dual clip, arXiv:1912.09729). `clip_range` stands for the low
    and the high one where they are not given; a higher high one is DAPO's (arXiv:2503.14476).
    """
    if clip_ratio_c <= 1:
        raise ValueError(
            f"algorithm.policy_loss_fn_args.clip_ratio_c is {clip_ratio_c:g}: expected more than 1"
        )
    low = clip_range if clip_range_low is None else clip_range_low
    high = clip_range if clip_range_high is None else clip_range_high
    log_ratio = (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(plain, clipped)
    bound = -advantages * clip_ratio_c
    bounded = (advantages < 0) & (pessimistic > bound)
    loss = torch.where(bounded, bound, pessimistic)
    reported = {
        "pg_clipfrac": (clipped > plain).float(),
        "pg_clipfrac_lower": bounded.float(),
        "ppo_kl": -log_ratio.detach(),
    }
    return loss, reported


def sft(logprobs: Tensor) -> Tensor:
    """-log p: the cross-entropy of the data's tokens."""
    return -logprobs

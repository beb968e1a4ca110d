"""An algorithm of one's own: two functions and a row."""

import torch
from torch import Tensor

from trireme import algorithm, by_group


def rank(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards [N], group ids [N] -> advantages [N]: the rank in the group, from -1 to 1."""
    out = torch.zeros_like(rewards)
    for member in by_group(groups):
        r = rewards[member]
        out[member] = (r[:, None] - r).sign().sum(1) / max(len(r) - 1, 1)
    return out


def soft_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, width: float = 0.2):
    """-A (1 + w tanh((r - 1) / w)): the ratio's gain saturates smoothly past `width`."""
    ratio = (logprobs - old_logprobs).exp()
    return -advantages * (1 + width * torch.tanh((ratio - 1) / width))


RANK_RL = algorithm("rank_rl", advantage=rank, policy_loss=soft_clip)

"""Names: what each reward is called in a YAML, and how a user adds one. Light: loads no part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trireme.registry import Registry

REWARD_PATHS = {
    "math_reward": "trireme.rewards.math.math_reward",
    "math_boxed_reward": "trireme.rewards.math.math_boxed_reward",
    "accuracy_reward": "trireme.rewards.math.accuracy_reward",
    "format_reward": "trireme.rewards.format.format_reward",
    "countdown_reward": "trireme.rewards.countdown.countdown_reward",
}

REWARDS = Registry("reward", REWARD_PATHS)


def reward(name: str) -> Callable[[Any], Any]:
    """Decorator: a function `(task, answer, *, options)` or a RewardFn class by this name."""
    return REWARDS.register(name)

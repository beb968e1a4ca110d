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
    "math_dapo_reward": "trireme.rewards.math.MathDapo",
    "countdown_reward": "trireme.rewards.countdown.countdown_reward",
}

REWARDS = Registry("reward", REWARD_PATHS)

_JUDGE = "trireme.rewards.judge"
_GROUP = "trireme.rewards.group"
ORM_PATHS = {
    "accuracy": f"{_GROUP}.MathAccuracy",
    "format": f"{_GROUP}.Format",
    "react_format": f"{_GROUP}.ReactFormat",
    "cosine": f"{_GROUP}.Cosine",
    "repetition": f"{_GROUP}.Repetition",
    "soft_overlong": f"{_GROUP}.SoftOverlong",
    "judge": f"{_JUDGE}.ModelJudge",
    "ruler": f"{_JUDGE}.RelativeJudge",
    "rubric": f"{_JUDGE}.RubricJudge",
}

ORMS = Registry("reward function", ORM_PATHS)
"""Rewards that see a task's rollouts together: see rewards/orm.py. `orms` for plug-ins."""


def reward(name: str) -> Callable[[Any], Any]:
    """Decorator: a function `(task, answer, *, options)` or a RewardFn class by this name."""
    return REWARDS.register(name)

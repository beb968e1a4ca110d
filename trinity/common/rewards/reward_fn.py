"""Import path of the class form of a reward."""

from __future__ import annotations

from trireme.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "REWARD_FUNCTIONS": "trireme.rewards.names:REWARDS",
        "RewardFn": "trireme.rewards.reward",
    },
)

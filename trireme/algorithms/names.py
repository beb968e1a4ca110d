"""Names: what each algorithm and each part of one is called, and how a user adds another.

Light: importing this loads no torch. A part is a function. Its arguments before the `*` are data,
filled in by name from the batch; those after it are its options, with their defaults, and what the
YAML gives as `<part>_args` is checked against them.

    @advantage("centred")
    def centred(rewards: Tensor, groups: Tensor) -> Tensor: ...

    algorithm("my_rl", advantage="centred", policy_loss="ppo", kl="none")   # in recipes.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trireme.registry import Registry

Part = TypeVar("Part", bound=Callable)

ALGORITHM_PATHS = {
    "sft": "trireme.algorithms.recipes.SFT",
    "grpo": "trireme.algorithms.recipes.GRPO",
    "multi_step_grpo": "trireme.algorithms.recipes.MULTI_STEP_GRPO",
    "gigpo": "trireme.algorithms.recipes.GIGPO",
}
ADVANTAGE_PATHS = {
    "grpo": "trireme.algorithms.advantage.grpo",
    "step_wise_grpo": "trireme.algorithms.advantage.step_wise_grpo",
    "gigpo": "trireme.algorithms.advantage.gigpo",
}
POLICY_LOSS_PATHS = {
    "ppo": "trireme.algorithms.policy_loss.ppo",
    "sft": "trireme.algorithms.policy_loss.sft",
}
KL_PATHS = {
    "none": "trireme.algorithms.kl.none",
    "k1": "trireme.algorithms.kl.k1",
    "k2": "trireme.algorithms.kl.k2",
    "k3": "trireme.algorithms.kl.k3",
    "low_var_kl": "trireme.algorithms.kl.low_var_kl",
    "abs": "trireme.algorithms.kl.absolute",
}
ENTROPY_PATHS = {
    "none": "trireme.algorithms.entropy.none",
    "default": "trireme.algorithms.entropy.default",
}
SAMPLE_PATHS = {
    "default": "trireme.algorithms.sample.default",
    "warmup": "trireme.algorithms.sample.default",
    "explore_step": "trireme.algorithms.sample.explore_step",
    "staleness_control": "trireme.algorithms.sample.staleness_control",
}
LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

ALGORITHMS = Registry("algorithm.algorithm_type", ALGORITHM_PATHS)
ADVANTAGES = Registry("algorithm.advantage_fn", ADVANTAGE_PATHS)
POLICY_LOSSES = Registry("algorithm.policy_loss_fn", POLICY_LOSS_PATHS)
KLS = Registry("algorithm.kl_loss_fn", KL_PATHS)
ENTROPIES = Registry("algorithm.entropy_loss_fn", ENTROPY_PATHS)
SAMPLES = Registry("algorithm.sample_strategy", SAMPLE_PATHS)


def advantage(name: str) -> Callable[[Part], Part]:
    """Decorator: an advantage `(rewards [N], groups [N], *, options) -> [N]` by this name."""
    return ADVANTAGES.register(name)


def policy_loss(name: str) -> Callable[[Part], Part]:
    """Decorator: a loss `(logprobs, old_logprobs, advantages, *, options) -> [M]` by this name."""
    return POLICY_LOSSES.register(name)


def kl_loss(name: str) -> Callable[[Part], Part]:
    """Decorator: a divergence `(logprobs, ref_logprobs, *, options) -> [M]` by this name."""
    return KLS.register(name)

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
    "sft": "trireme.algorithms.table.SFT",
    "cpt": "trireme.algorithms.table.CPT",
    "ppo": "trireme.algorithms.table.PPO",
    "grpo": "trireme.algorithms.table.GRPO",
    "multi_step_grpo": "trireme.algorithms.table.MULTI_STEP_GRPO",
    "gigpo": "trireme.algorithms.table.GIGPO",
    "dapo": "trireme.algorithms.table.DAPO",
    "dr_grpo": "trireme.algorithms.table.DR_GRPO",
    "gspo": "trireme.algorithms.table.GSPO",
    "cispo": "trireme.algorithms.table.CISPO",
    "sapo": "trireme.algorithms.table.SAPO",
    "rloo": "trireme.algorithms.table.RLOO",
    "reinforceplusplus": "trireme.algorithms.table.REINFORCEPLUSPLUS",
    "remax": "trireme.algorithms.table.REMAX",
    "opmd": "trireme.algorithms.table.OPMD",
    "asymre": "trireme.algorithms.table.ASYMRE",
    "topr": "trireme.algorithms.table.TOPR",
    "sppo": "trireme.algorithms.table.SPPO",
    "rec": "trireme.algorithms.table.REC",
    "raft": "trireme.algorithms.table.RAFT",
    "dpo": "trireme.algorithms.table.DPO",
    "mix": "trireme.algorithms.table.MIX",
    "mix_chord": "trireme.algorithms.table.MIX_CHORD",
    "on_policy_distill": "trireme.algorithms.table.ON_POLICY_DISTILL",
    "jsd": "trireme.algorithms.table.JSD",
    "grpo_verl": "trireme.algorithms.table.GRPO",
}
ADVANTAGE_PATHS = {
    "grpo": "trireme.algorithms.advantage.grpo",
    "dapo": "trireme.algorithms.advantage.dapo",
    "step_wise_grpo": "trireme.algorithms.advantage.step_wise_grpo",
    "gigpo": "trireme.algorithms.advantage.gigpo",
    "reinforce": "trireme.algorithms.baseline.reinforce",
    "rloo": "trireme.algorithms.baseline.rloo",
    "opmd": "trireme.algorithms.baseline.opmd",
    "asymre": "trireme.algorithms.baseline.asymre",
    "rec": "trireme.algorithms.baseline.rec",
    "remax": "trireme.algorithms.baseline.remax",
    "raft": "trireme.algorithms.baseline.raft",
    "ppo": "trireme.algorithms.token_advantage.gae",
    "reinforceplusplus": "trireme.algorithms.token_advantage.reinforceplusplus",
    "on_policy_distill": "trireme.algorithms.token_advantage.on_policy_distill",
    "jsd": "trireme.algorithms.token_advantage.jsd",
    "clipb": "trireme.algorithms.entropy_clip.clipb",
    "clipv": "trireme.algorithms.entropy_clip.clipv",
}
POLICY_LOSS_PATHS = {
    "ppo": "trireme.algorithms.policy_loss.ppo",
    "sft": "trireme.algorithms.policy_loss.sft",
    "sft_is": "trireme.algorithms.policy_loss.sft_is",
    "sft_phi": "trireme.algorithms.policy_loss.sft_phi",
    "opmd": "trireme.algorithms.policy_loss.opmd",
    "importance_sampling": "trireme.algorithms.policy_loss.importance_sampling",
    "cispo": "trireme.algorithms.policy_loss.cispo",
    "sapo": "trireme.algorithms.policy_loss.sapo",
    "topr": "trireme.algorithms.policy_loss.topr",
    "sppo": "trireme.algorithms.policy_loss.sppo",
    "gspo": "trireme.algorithms.sequence_loss.gspo",
    "dpo": "trireme.algorithms.sequence_loss.dpo",
    "rec": "trireme.algorithms.sequence_loss.rec",
    "mix": "trireme.algorithms.mix.mix",
    "mix_chord": "trireme.algorithms.mix.mix_chord",
}
KL_PATHS = {
    "none": "trireme.algorithms.kl.none",
    "k1": "trireme.algorithms.kl.k1",
    "k2": "trireme.algorithms.kl.k2",
    "k3": "trireme.algorithms.kl.k3",
    "low_var_kl": "trireme.algorithms.kl.low_var_kl",
    "abs": "trireme.algorithms.kl.absolute",
    "corrected_k3": "trireme.algorithms.kl.corrected_k3",
}
ENTROPY_PATHS = {
    "none": "trireme.algorithms.entropy.none",
    "default": "trireme.algorithms.entropy.default",
    "mix": "trireme.algorithms.entropy.mix",
}
SAMPLE_PATHS = {
    "default": "trireme.algorithms.sample.default",
    "warmup": "trireme.algorithms.sample.default",
    "explore_step": "trireme.algorithms.sample.explore_step",
    "staleness_control": "trireme.algorithms.sample.staleness_control",
    "mix": "trireme.algorithms.sample.mix",
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

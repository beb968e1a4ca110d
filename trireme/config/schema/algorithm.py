"""Algorithm section: which algorithm learns, from how many rollouts, with which optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.config.schema.number import number


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights move at a train step."""

    lr: float = number(1e-6, at_least=0)
    """Learning rate at its peak."""
    lr_warmup_steps: int = number(-1, at_least=-1)
    """Train steps of linear warm-up; -1 takes `lr_warmup_steps_ratio` instead."""
    lr_warmup_steps_ratio: float = number(0.0, at_least=0, at_most=1)
    """Warm-up as a share of all train steps."""
    min_lr_ratio: float | None = number(0.01, at_least=0, at_most=1)
    """Where a cosine schedule ends, as a share of `lr`."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Schedule after the warm-up."""
    warmup_style: Literal["constant", "cosine"] | None = None
    """Older name of `lr_scheduler_type`."""
    optimizer_type: Literal["adam", "adamw", "sgd"] = "adam"
    """adam and adamw are both AdamW."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of Adam's two moments."""
    weight_decay: float = number(0.01, at_least=0)
    """Decoupled weight decay."""
    clip_grad: float = number(1.0, above=0)
    """Older place of `trainer.grad_clip`."""


@dataclass(frozen=True)
class CriticConfig:
    """The value model of algorithms that have one; it starts from `model.critic_model_path`."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Its own learning rate (1e-5 where not given), schedule, optimizer."""
    cliprange_value: float = number(0.5, above=0)
    """How far a value may move in one update before it stops gaining."""
    warmup_steps: int = number(0, at_least=0)
    """Train steps at the start in which it learns alone and the policy stays."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """The algorithm, by name, and the parts of it that the user replaces."""

    algorithm_type: str = "ppo"
    """A name that `trireme algorithms` lists, or the path of a user's own, `file:name`."""
    repeat_times: int = number(1, at_least=1)
    """Rollouts of each task: the group that group-relative advantages compare."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Learning rate, schedule, optimizer."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model of `ppo`."""
    sample_strategy: str | None = None
    """How a train batch is drawn from the buffer; not given: the algorithm's own."""
    sample_strategy_args: dict[str, Any] | None = None
    """Options of `sample_strategy`, laid over its defaults."""
    advantage_fn: str | None = None
    """Advantage function; not given: the algorithm's own."""
    advantage_fn_args: dict[str, Any] | None = None
    """Options of the advantage function."""
    policy_loss_fn: str | None = None
    """Policy loss; not given: the algorithm's own."""
    policy_loss_fn_args: dict[str, Any] | None = None
    """Options of the policy loss."""
    kl_penalty_fn: str | None = None
    """KL taken off the token rewards; algorithms that compute advantages in the trainer only."""
    kl_penalty_fn_args: dict[str, Any] | None = None
    """Options of the KL penalty."""
    kl_loss_fn: str | None = None
    """KL to the reference, added to the loss: none, k1, k2, k3, low_var_kl, abs, corrected_k3."""
    kl_loss_fn_args: dict[str, Any] | None = None
    """Its options; `kl_coef: 0` loads no reference model, `adaptive: true` follows target_kl."""
    entropy_loss_fn: str | None = None
    """Entropy bonus; not given: the algorithm's own."""
    entropy_loss_fn_args: dict[str, Any] | None = None
    """Options of the entropy bonus, `entropy_coef` among them."""
    loss_agg_mode: (
        Literal[
            "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
        ]
        | None
    ) = None
    """How token losses become one number; not given: the algorithm's own."""
    bypass_old_logprobs: bool = True
    """Take the sampler's log-probabilities as the old ones instead of computing them again."""
    rollout_correction: dict[str, Any] = field(default_factory=dict)
    """Correction between engine and trainer: rollout_is, rollout_rs, their thresholds."""
    enable_router_replay: bool = False
    """Replay the engine's expert choices in mixture-of-experts models."""

"""Recipes: which parts an algorithm is made of, one row each.

A row names its parts; `get_recipe` lays what the YAML says over the row and checks it against the
parts' signatures. A recipe is all that explorer (advantages) and trainer (loss) know of an
algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from trireme.algorithms import names
from trireme.algorithms.assign import assign_advantages
from trireme.algorithms.part import Part, make_part
from trireme.algorithms.reduce import weights
from trireme.algorithms.sample import Sample, Takes
from trireme.batch import Batch
from trireme.experience import Experience

_REGISTRIES = {
    "advantage_fn": names.ADVANTAGES,
    "policy_loss_fn": names.POLICY_LOSSES,
    "kl_loss_fn": names.KLS,
    "entropy_loss_fn": names.ENTROPIES,
    "sample_strategy": names.SAMPLES,
}


@dataclass(frozen=True)
class Recipe:
    """One algorithm. Fields ending in `_fn` name a part; `options` holds its arguments by field."""

    name: str
    policy_loss_fn: str
    advantage_fn: str | None = None
    """None: nothing is computed before the buffer."""
    kl_loss_fn: str = "none"
    entropy_loss_fn: str = "none"
    loss_agg_mode: str = "token-mean"
    sample_strategy: str = "default"
    schema: Literal["experience", "sft", "dpo"] = "experience"
    """What the rows of its buffer are."""
    group_size: int = 1
    """Rollouts of a task, where the YAML does not say."""
    bypass_old_logprobs: bool = True
    """The sampler's log-probabilities are the old ones; False: the trainer's own."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Every part by its field. Raises ValueError for an unknown part or option."""
        return {
            kind: make_part(kind, registry, name, self.options.get(kind))
            for kind, registry in _REGISTRIES.items()
            if (name := getattr(self, kind)) is not None
        }

    @property
    def policy_loss(self) -> Part:
        """The loss of each token."""
        return self.parts["policy_loss_fn"]

    @property
    def kl(self) -> Part | None:
        """The distance to the reference model; None where it has no weight."""
        part = self.parts["kl_loss_fn"]
        return part if part.coefficient and part.name != "none" else None

    @property
    def entropy(self) -> Part | None:
        """The entropy bonus; None where it has no weight."""
        part = self.parts["entropy_loss_fn"]
        return part if part.coefficient and part.name != "none" else None

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model has to be loaded."""
        return self.kl is not None or "ref_logprobs" in self.policy_loss.data()

    @property
    def idle_at_zero_advantage(self) -> bool:
        """Whether a token without an advantage has no gradient."""
        loss = self.policy_loss
        known = getattr(loss.function, "idle_at_zero_advantage", False)
        return known and self.kl is None and self.entropy is None

    def advantages(
        self, experiences: list[Experience]
    ) -> tuple[list[Experience], dict[str, float]]:
        """Write `advantages` and `returns` of whole groups; those to be trained, and metrics."""
        if self.advantage_fn is None:
            return experiences, {}
        return assign_advantages(self.parts["advantage_fn"], experiences)

    def weights(self, batch: Batch) -> Tensor:
        """The weight of each entry [M] in the loss of the whole batch."""
        out = weights(self.loss_agg_mode, batch.sample_ids, batch.num_samples, width=batch.width)
        loss_weight = batch.fields.get("loss_weight")
        return out if loss_weight is None else out * loss_weight

    async def take(self, buffer: Takes, num: int, version: int = 0) -> Sample:
        """Experiences for a train step by the sample strategy, and its metrics."""
        part = self.parts["sample_strategy"]
        return await part.function(buffer, num, version, **part.options)


SFT = Recipe("sft", policy_loss_fn="sft", schema="sft")
GRPO = Recipe(
    "grpo", policy_loss_fn="ppo", advantage_fn="grpo", kl_loss_fn="k2", entropy_loss_fn="default"
)
MULTI_STEP_GRPO = replace(GRPO, name="multi_step_grpo", advantage_fn="step_wise_grpo")
GIGPO = replace(
    GRPO,
    name="gigpo",
    advantage_fn="gigpo",
    group_size=8,
    options={"policy_loss_fn": {"clip_range_low": 0.2, "clip_range_high": 0.2}},
)


def algorithm(
    name: str,
    *,
    policy_loss: str | Callable = "ppo",
    advantage: str | Callable | None = "grpo",
    kl: str | Callable = "none",
    entropy: str | Callable = "none",
    loss_agg_mode: str = "token-mean",
    sample: str | Callable = "default",
    group_size: int = 1,
) -> Recipe:
    """Register a user's algorithm under `algorithm.algorithm_type: <name>`; its parts by name."""
    recipe = Recipe(
        name,
        policy_loss_fn=_named(names.POLICY_LOSSES, policy_loss),
        advantage_fn=None if advantage is None else _named(names.ADVANTAGES, advantage),
        kl_loss_fn=_named(names.KLS, kl),
        entropy_loss_fn=_named(names.ENTROPIES, entropy),
        loss_agg_mode=loss_agg_mode,
        sample_strategy=_named(names.SAMPLES, sample),
        group_size=group_size,
    )
    names.ALGORITHMS.register_module(name, recipe)
    return recipe


def get_recipe(config: Any) -> Recipe:
    """The recipe of the YAML's `algorithm` section. Raises ValueError for what it cannot be.

    `config` has the fields of `AlgorithmConfig`. A `*_fn` that is not given is the row's.
    `*_fn_args` are laid over the options of the row's part, or over the defaults of another part
    where one is named.
    """
    row = names.ALGORITHMS.get(config.algorithm_type)
    if not isinstance(row, Recipe):
        raise ValueError(
            f"algorithm.algorithm_type '{config.algorithm_type}' is not a Recipe: {row!r}"
        )
    penalty = getattr(config, "kl_penalty_fn", None)
    if penalty not in (None, "none"):
        raise ValueError(
            f"algorithm.kl_penalty_fn is '{penalty}': '{row.name}' computes its advantages "
            "before the trainer, where no reference model is; use kl_loss_fn, or 'none' here"
        )
    chosen: dict[str, Any] = {"bypass_old_logprobs": getattr(config, "bypass_old_logprobs", True)}
    options = {kind: dict(args) for kind, args in row.options.items()}
    for kind in _REGISTRIES:
        given = getattr(config, kind, None)
        if given is not None:
            chosen[kind] = given
            if given != getattr(row, kind):
                options.pop(kind, None)
        if args := getattr(config, f"{kind}_args", None):
            options[kind] = {**options.get(kind, {}), **args}
    # The YAML may hold the mode among the policy loss's options; its own key wins.
    older_mode = options.get("policy_loss_fn", {}).pop("loss_agg_mode", None)
    if mode := getattr(config, "loss_agg_mode", None) or older_mode:
        chosen["loss_agg_mode"] = mode
    recipe = replace(row, **chosen, options=options)
    for kind in options:
        if getattr(recipe, kind) is None:
            raise ValueError(f"algorithm.{kind}_args: algorithm_type '{row.name}' has no {kind}")
    assert recipe.parts
    if recipe.loss_agg_mode not in names.LOSS_AGG_MODES:
        raise ValueError(
            f"algorithm.loss_agg_mode is '{recipe.loss_agg_mode}': expected one of "
            f"{', '.join(names.LOSS_AGG_MODES)}"
        )
    return recipe


def _named(registry: Any, part: str | Callable) -> str:
    """The part's name; a function given itself is registered under its own."""
    if isinstance(part, str):
        return part
    registry.register_module(part.__name__, part)
    return part.__name__

"""Recipes: merges the YAML's options into an algorithm's parts; users register algorithms here.

`get_recipe` applies the YAML's settings to a row of the table (table.py) and checks them against
the parts' signatures. A recipe is all that explorer (advantages) and trainer (loss) know of an
algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from types import EllipsisType
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor

from trireme.algorithms.assign import assign_advantages, reward_metrics
from trireme.algorithms.check import check
from trireme.algorithms.kl import weights
from trireme.algorithms.part import PARTS, Part, make_part, named, part_of
from trireme.algorithms.policy_loss import rollout_correction
from trireme.algorithms.sample import Sample, Takes, own_share
from trireme.batch import Batch, Columns
from trireme.config.dialect import adapted
from trireme.config.options import parameters_of
from trireme.experience import Experience
from trireme.registry import ALGORITHMS
from trireme.usercode import UserCode

DIVERGENCES = {
    "kl_loss_fn": ("kl", "ref_logprobs"),
    "teacher_kl_fn": ("teacher_kl", "teacher_logprobs"),
}
"""Maps terms of the loss to their metrics' name, and the log-probabilities that they compare
with."""
Schema = Literal["experience", "sft", "dpo", "kto", "cpt"]
_P = ParamSpec("_P")
Given = str | Callable | EllipsisType
"""A part of an algorithm by name, or the function itself; `...` if it is not given."""


@dataclass(frozen=True)
class Recipe:
    """One algorithm. Fields ending in `_fn` name a part; `options` holds its arguments by field."""

    name: str
    policy_loss_fn: str
    advantage_fn: str | None = None
    """None: no advantage is computed."""
    kl_penalty_fn: str = "none"
    kl_loss_fn: str = "none"
    teacher_kl_fn: str = "none"
    entropy_loss_fn: str = "none"
    loss_agg_mode: str = "token-mean"
    sample_strategy: str = "default"
    schema: Schema = "experience"
    """The kind of rows in its buffer."""
    group_size: int = 1
    """Rollouts of a task if the YAML sets no number."""
    greedy_run: bool = False
    """Whether run 0 of a task is greedy: a baseline."""
    bypass_old_logprobs: bool = True
    """Whether the sampler's log-probabilities are the old ones; False: the trainer's own."""
    num_iterations: int = 1
    """Optimizer steps on a batch."""
    ref_sync_steps: int = 0
    """Optimizer steps between two moves of the reference towards the policy; 0: it is fixed."""
    ref_mixup_alpha: float = 0.6
    """Share of the policy's weights in the reference then."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    use: str = ""
    """The case for choosing it, in a sentence."""

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Return every part by its field. Raises ValueError for an unknown part or option."""
        parts = {
            kind: make_part(kind, name, self.options.get(kind))
            for kind in PARTS
            if (name := getattr(self, kind)) is not None
        }
        if correction := self.options.get("rollout_correction"):
            kind = "rollout_correction"
            parts[kind] = part_of(kind, kind, rollout_correction, correction)
        return parts

    @property
    def policy_loss(self) -> Part:
        """The loss of each token."""
        return self.parts["policy_loss_fn"]

    @property
    def kl(self) -> Part | None:
        """The distance to the reference model in the loss; None if it has no weight."""
        return self._weighted("kl_loss_fn")

    @property
    def teacher(self) -> Part | None:
        """The distance to a teacher in the loss; None if it has no weight."""
        return self._weighted("teacher_kl_fn")

    @property
    def divergences(self) -> dict[str, tuple[str, str]]:
        """The members of DIVERGENCES that have a weight."""
        return {kind: names for kind, names in DIVERGENCES.items() if self._weighted(kind)}

    @property
    def penalty(self) -> Part | None:
        """The distance to the reference model that is subtracted from the rewards; None: no
        weight.
        """
        return self._weighted("kl_penalty_fn")

    @property
    def entropy(self) -> Part | None:
        """The entropy bonus; None if it has no weight. A class has its own coefficient."""
        part = self._weighted("entropy_loss_fn")
        return None if part is not None and part.option("entropy_coef") == 0 else part

    @property
    def averages(self) -> list[Part]:
        """The terms of the loss that are classes, which average over tokens themselves."""
        return [p for p in (self.policy_loss, self.entropy) if p and p.marked("averages")]

    @property
    def unused_options(self) -> list[str]:
        """Terms of the loss, and the penalty, that have options but are not used."""
        terms = ("kl_loss_fn", "kl_penalty_fn", "entropy_loss_fn")
        return [kind for kind in terms if self.options.get(kind) and getattr(self, kind) == "none"]

    @property
    def weighs_by_length(self) -> bool:
        """True if a loss of whole samples meets an average in which a longer one weighs more."""
        return self.policy_loss.marked("of_sequences") and (
            self.loss_agg_mode != "seq-mean-token-mean"
        )

    @property
    def top_entropy(self) -> float:
        """The share of tokens that the policy learns from: those of the highest entropy
        (arXiv:2506.01939).
        """
        return float(self.policy_loss.settings["top_entropy_quantile"])

    @property
    def selects(self) -> bool:
        """True if the policy learns from a part of the batch's tokens."""
        return self.top_entropy < 1 or self.policy_loss.marked("selects")

    @property
    def keeps_old_logprobs(self) -> bool:
        """True if the trainer's own log-probabilities from before the first optimizer step on a
        batch are needed in the later ones.
        """
        own = not self.bypass_old_logprobs or self.correction is not None
        return self.num_iterations > 1 and own

    @property
    def correction(self) -> Part | None:
        """The correction between sampler and trainer, if there is one."""
        return self.parts.get("rollout_correction")

    @property
    def token_advantage(self) -> Part | None:
        """The advantage, if the trainer computes it."""
        part = self.parts.get("advantage_fn")
        return part if part is not None and part.marked("in_trainer") else None

    @property
    def needs_reference(self) -> bool:
        """True if a reference model must be loaded."""
        return bool(self.kl or self.penalty) or self.asks("ref_logprobs")

    @property
    def needs_teacher(self) -> bool:
        """True if a teacher must score the policy's samples."""
        return self.teacher is not None or self.asks("teacher_logprobs")

    @property
    def rewards_teach(self) -> bool:
        """True if the policy learns from rewards, and no teacher replaces them."""
        return not self.asks("teacher_logprobs")

    @property
    def needs_critic(self) -> bool:
        """True if a value model must be loaded."""
        return self.asks("values")

    @property
    def needs_groups(self) -> bool:
        """True if the advantage compares the rollouts of one task, so that a single one gives
        nothing.
        """
        if self.advantage_fn is None:
            return False
        part = self.parts["advantage_fn"]
        part = part.before or part
        return part.data().get("groups") is False and not part.marked("takes_one_rollout")

    @property
    def expert_ratio(self) -> float | None:
        """The share of a train batch that the sample strategy takes from an expert's data; None
        without an option `expert_data_ratio`. Raises ValueError for an invalid share.
        """
        strategy = self.parts["sample_strategy"]
        option = parameters_of(strategy.function).get("expert_data_ratio")
        if option is None:
            return None
        ratio = float(strategy.options.get("expert_data_ratio", option.default))
        own_share(1, ratio)
        return ratio

    @property
    def from_data(self) -> bool:
        """True if it learns from a data set, without an explorer."""
        return self.schema != "experience"

    @property
    def idle_at_zero_advantage(self) -> bool:
        """True if a token without an advantage has no gradient."""
        known = self.policy_loss.marked("idle_at_zero_advantage")
        return known and self.kl is None and self.teacher is None and self.entropy is None

    @property
    def takes_once(self) -> bool:
        """True if a batch comes from one call of the buffer."""
        return self.parts["sample_strategy"].marked("takes_once")

    def asks(self, name: str) -> bool:
        """True if advantage, loss or entropy require this data."""
        kinds = ("advantage_fn", "policy_loss_fn", "entropy_loss_fn")
        parts = (self.parts[kind] for kind in kinds if kind in self.parts)
        return any(part.data().get(name) is False for part in parts)

    @property
    def max_resample_times(self) -> int | None:
        """Further explore steps that a batch may take for groups that were left out; None: any
        number.
        """
        part = self.parts.get("advantage_fn")
        most = part.settings["max_resample_times"] if part is not None else None
        return None if most is None else int(most)

    def advantages(
        self, experiences: list[Experience], *, at_least: int = 0
    ) -> tuple[list[Experience], dict[str, float]]:
        """Write `advantages` and `returns` of whole groups; returns the experiences to train on,
        and metrics.

        At least `at_least` experiences stay if there are as many, taken if necessary from groups
        that would be left out.
        """
        if self.advantage_fn is None:
            return experiences, {}
        part = self.parts["advantage_fn"]
        groups = part.before if part.marked("in_trainer") else part
        if groups is None:
            return experiences, reward_metrics(experiences)
        if groups.marked("of_experiences"):
            with UserCode(f"algorithm.{groups.label}", groups.function):
                return groups.function(experiences, **groups.options)
        duplicate = bool(part.settings["duplicate_experiences"])
        return assign_advantages(groups, experiences, duplicate=duplicate, at_least=at_least)

    def weights(self, batch: Batch, experts: Tensor | None = None) -> Tensor:
        """Return the weight of each entry [M] in the loss of the whole batch. `experts` [N] are
        samples that are averaged separately.
        """
        loss_weight = batch.fields.get("loss_weight")
        if loss_weight is not None:
            for part in self.averages:
                _refuse_weights(part, batch, loss_weight, (1,), "a class whose loss is an average")
            if self.policy_loss.marked("of_sequences"):
                whole = "a loss of whole sequences"
                _refuse_weights(self.policy_loss, batch, loss_weight, (0, 1), whole)
        if experts is None:
            out = weights(
                self.loss_agg_mode, batch.sample_ids, batch.num_samples, width=batch.width
            )
        else:
            out = torch.empty(batch.num_tokens, dtype=torch.float32)
            for option, kind in (("sft_loss_agg_mode", experts), ("grpo_loss_agg_mode", ~experts)):
                part = batch.select(kind.nonzero().flatten().tolist())
                mode = self.policy_loss.options.get(option) or self.loss_agg_mode
                out[kind[batch.sample_ids]] = weights(
                    mode, part.sample_ids, part.num_samples, width=part.width
                )
        return out if loss_weight is None else out * loss_weight

    async def take(
        self,
        buffer: Takes,
        num: int,
        version: int = 0,
        auxiliary: Mapping[str, Takes] | None = None,
        step: int = 1,
    ) -> Sample:
        """Take the experiences of a train step by the sample strategy; also returns its metrics."""
        arguments: dict[str, Any] = {"buffer": buffer, "num": num, "version": version}
        arguments |= {"auxiliary": auxiliary or {}, "step": step}
        return await self.parts["sample_strategy"](Columns(arguments))

    def _weighted(self, kind: str) -> Part | None:
        part = self.parts[kind]
        return part if part.coefficient and part.name != "none" else None


def _refuse_weights(
    part: Part, batch: Batch, loss_weight: Tensor, taken: tuple[int, ...], kind: str
) -> None:
    odd = (~torch.isin(loss_weight, loss_weight.new_tensor(taken))).nonzero()
    if len(odd):
        entry = int(odd[0])
        raise ValueError(
            f"experience {batch.eid_of(entry)} has a loss_weight of "
            f"{float(loss_weight[entry]):g}: {part.label} is {kind} and takes weights of "
            f"{' and '.join(map(str, taken))} only"
        )


def recipe(
    name: str,
    *,
    like: str | None = None,
    policy_loss: Given = ...,
    advantage: Given | None = ...,
    kl: Given = ...,
    entropy: Given = ...,
    loss_agg_mode: str | None = None,
    sample: Given = ...,
    group_size: int | None = None,
    greedy_run: bool | None = None,
    schema: Schema | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    use: str = "",
) -> Recipe:
    """Make an algorithm of its parts. `algorithm` also registers it, under its name as
    `algorithm.algorithm_type`.

    Anything not given comes from the algorithm `like`; without one, policy loss `ppo`, advantage
    `grpo`, and neither a KL nor an entropy term.
    """
    parts = {
        "policy_loss_fn": policy_loss,
        "advantage_fn": advantage,
        "kl_loss_fn": kl,
        "entropy_loss_fn": entropy,
        "sample_strategy": sample,
    }
    others = {
        "loss_agg_mode": loss_agg_mode,
        "group_size": group_size,
        "greedy_run": greedy_run,
        "schema": schema,
        "options": options,
    }
    base = ALGORITHMS.get(like) or Recipe(name, policy_loss_fn="ppo", advantage_fn="grpo")
    return replace(
        base,
        name=name,
        use=use,
        **{k: named(k, part) for k, part in parts.items() if part is not ...},
        **{field: value for field, value in others.items() if value is not None},
    )


def _registered(make: Callable[_P, Recipe]) -> Callable[_P, Recipe]:
    @wraps(make)
    def register(*args: _P.args, **kwargs: _P.kwargs) -> Recipe:
        made = make(*args, **kwargs)
        return ALGORITHMS.register_module(made.name, made)

    return register


algorithm = _registered(recipe)


def row_of(algorithm_type: str) -> Recipe:
    """Return a registered algorithm. Raises ValueError for an unknown one."""
    row = adapted("algorithm_type", algorithm_type, ALGORITHMS.get(algorithm_type))
    if not isinstance(row, Recipe):
        raise ValueError(f"algorithm.algorithm_type '{algorithm_type}' is not a Recipe: {row!r}")
    return row


def get_recipe(config: Any) -> Recipe:
    """Make the recipe of the YAML's `algorithm` section. Raises ValueError if the section is
    invalid.

    `config` has the fields of `AlgorithmConfig`. A `*_fn` that is not given is the row's.
    `*_fn_args` override the options of the row's part, or the defaults of another part if one is
    named.
    """
    row = row_of(config.algorithm_type)
    chosen: dict[str, Any] = {
        "bypass_old_logprobs": getattr(config, "bypass_old_logprobs", True),
        "num_iterations": getattr(config, "num_iterations", 1),
    }
    if getattr(config, "sync_ref_model", False):
        chosen["ref_sync_steps"] = getattr(config, "ref_model_sync_steps", 512)
        chosen["ref_mixup_alpha"] = getattr(config, "ref_model_mixup_alpha", 0.6)
    options = {kind: dict(args) for kind, args in row.options.items()}
    for kind in PARTS:
        chosen_part = getattr(config, kind, None)
        if chosen_part is not None:
            chosen[kind] = chosen_part
            if chosen_part != getattr(row, kind):
                options.pop(kind, None)
        if args := getattr(config, f"{kind}_args", None):
            options[kind] = {**options.get(kind, {}), **args}
    if correction := getattr(config, "rollout_correction", None):
        options["rollout_correction"] = dict(correction)
        # The weight is p_trainer / p_sampler: the loss's own ratio must not contain it again.
        if correction.get("rollout_is"):
            chosen["bypass_old_logprobs"] = False
    # The YAML may have the mode among the policy loss's options; its own key wins.
    older_mode = options.get("policy_loss_fn", {}).pop("loss_agg_mode", None)
    if mode := getattr(config, "loss_agg_mode", None) or older_mode:
        chosen["loss_agg_mode"] = mode
    recipe = replace(row, **chosen, options=options)
    for kind in options:
        if getattr(recipe, kind, kind) is None:
            raise ValueError(f"algorithm.{kind}_args: algorithm_type '{row.name}' has no {kind}")
    check(recipe, row)
    return _with_mode(recipe, mode) if mode else recipe


def _with_mode(recipe: Recipe, mode: str) -> Recipe:
    """Give the mode of the mean to the losses that are averages and have an option for it."""
    options = {kind: dict(args) for kind, args in recipe.options.items()}
    for part in recipe.averages:
        if "loss_agg_mode" in parameters_of(part.function):
            options.setdefault(part.kind, {})["loss_agg_mode"] = mode
    return replace(recipe, options=options)

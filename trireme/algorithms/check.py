"""Check: refuses combinations of parts of an algorithm that are each valid alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trireme.algorithms.kl import LOSS_AGG_MODES
from trireme.config.options import parameters_of
from trireme.registry import ADVANTAGES

if TYPE_CHECKING:
    from trireme.algorithms.part import Part
    from trireme.algorithms.recipes import Recipe

_LABELLED = {"dpo": ("pair_ids", "pairs"), "kto": ("desirable", "labelled replies")}
"""Schemas whose rows alone have a column that a loss may require: the column, and the noun for such
rows."""


def check(recipe: Recipe, row: Recipe) -> None:
    """Raise ValueError for parts that are valid alone and not together. `row` is the registered
    algorithm, before a YAML chose other parts.
    """
    penalty, part = recipe.penalty, recipe.token_advantage  # an unknown part is reported first
    if recipe.loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"algorithm.loss_agg_mode is '{recipe.loss_agg_mode}': expected one of "
            f"{', '.join(LOSS_AGG_MODES)}"
        )
    if penalty is not None and part is None:
        _check_group_penalty(recipe)
    if penalty is not None and part is not None and "token_rewards" not in part.data():
        raise ValueError(
            f"algorithm.kl_penalty_fn is '{recipe.kl_penalty_fn}', and {part.label} learns from no "
            "token's reward, which it is taken off: expected kl_loss_fn, and none here"
        )
    if recipe.ref_sync_steps and not recipe.needs_reference:
        raise ValueError(
            f"algorithm.sync_ref_model is true, and '{recipe.name}' has no reference model: "
            "expected a kl_loss_fn with a kl_coef above 0, or false"
        )
    _check_teacher(recipe)
    if part and part.before is None and part.settings["duplicate_experiences"]:
        raise ValueError(
            f"algorithm.advantage_fn_args.duplicate_experiences: {part.label} leaves no group out, "
            "so that there is none to be refilled"
        )
    _check_resampling(recipe)
    for schema, (column, kind) in _LABELLED.items():
        _check_labelled(recipe, schema, column, kind)
        if recipe.asks(column) and recipe.loss_agg_mode != "seq-mean-token-mean":
            raise ValueError(
                f"algorithm.loss_agg_mode is '{recipe.loss_agg_mode}': {recipe.policy_loss.label} "
                f"is a loss of {kind}, whose mean is 'seq-mean-token-mean'"
            )
        if recipe.asks(column) and recipe.top_entropy < 1:
            raise ValueError(
                "algorithm.policy_loss_fn_args.top_entropy_quantile chooses tokens, and "
                f"{recipe.policy_loss.label} is a loss of {kind}: expected 1"
            )
    if recipe.from_data:
        _refuse_sampled(recipe)
        if recipe.advantage_fn != row.advantage_fn:
            _refuse_idle_advantage(recipe)
    if recipe.policy_loss.marked("of_groups") and recipe.loss_agg_mode != "seq-mean-token-mean":
        raise ValueError(
            f"algorithm.loss_agg_mode is '{recipe.loss_agg_mode}': {recipe.policy_loss.label} is a "
            "loss of groups of samples, whose mean is 'seq-mean-token-mean'"
        )
    for average in recipe.averages:
        _refuse_switches_of_tokens(recipe, average)
    if recipe.asks("expert") and recipe.sample_strategy != "mix":
        raise ValueError(
            f"algorithm.sample_strategy is '{recipe.sample_strategy}': '{recipe.name}' needs an "
            "expert's rows, which 'mix' brings"
        )
    if recipe.sample_strategy == "mix":
        _refuse_idle_experts(recipe)


def _refuse_idle_experts(recipe: Recipe) -> None:
    """Raise ValueError for a policy loss that would learn nothing from an expert's rows."""
    loss = recipe.policy_loss
    if loss.marked("idle_at_zero_advantage") and "expert" not in loss.data():
        raise ValueError(
            "algorithm.sample_strategy 'mix' brings an expert's rows, whose advantages are 0, and "
            f"{loss.label} learns nothing from these: expected a loss that takes 'expert', such as "
            "'mix', or another strategy"
        )


def _check_group_penalty(recipe: Recipe) -> None:
    """Raise ValueError for a KL penalty on rewards if the trainer does not get whole groups, or if
    rewards are not one number per rollout.
    """
    given = f"algorithm.kl_penalty_fn is '{recipe.kl_penalty_fn}', and '{recipe.name}'"
    if recipe.advantage_fn is None:
        raise ValueError(f"{given} has no rewards: expected none")
    part = recipe.parts["advantage_fn"]
    asked = part.data()
    of_rollouts = "rewards" in asked and not asked.keys() & {"steps", "step_rewards"}
    if part.marked("of_experiences") or recipe.greedy_run or not of_rollouts:
        raise ValueError(
            f"{given} has an advantage ({part.name}) that is not one of each rollout's reward: "
            "expected one such as grpo or rloo; or use kl_loss_fn, and none here"
        )
    if recipe.sample_strategy != "explore_step":
        raise ValueError(
            f"{given} compares the rollouts of a task, which a train batch may split: expected "
            "sample_strategy explore_step as well; or use kl_loss_fn, and none here"
        )
    if part.settings["duplicate_experiences"]:
        raise ValueError(
            f"{given} compares rollouts once more in the trainer, where the copies that "
            "algorithm.advantage_fn_args.duplicate_experiences adds would count as rollouts: "
            "expected duplicate_experiences: false; or use kl_loss_fn, and none here"
        )


def _check_labelled(recipe: Recipe, schema: str, column: str, kind: str) -> None:
    """Raise ValueError for rows of this schema without its loss, and for the loss without them."""
    asks, key = recipe.asks(column), "algorithm.policy_loss_fn"
    if asks and recipe.schema != schema:
        raise ValueError(
            f"{key} is '{recipe.policy_loss_fn}': a loss of {kind} is of algorithm_type {schema}, "
            "and of no other"
        )
    if not asks and recipe.schema == schema:
        raise ValueError(
            f"{key} is '{recipe.policy_loss_fn}', which is not a loss of {kind}: '{recipe.name}' "
            f"learns from these, expected a loss such as '{schema}'"
        )


def _refuse_sampled(recipe: Recipe) -> None:
    """Raise ValueError for parts that learn from what a policy sampled: no row of data has it."""
    if recipe.correction is not None:
        raise ValueError(
            "algorithm.rollout_correction compares the trainer with the engine that sampled, and "
            f"'{recipe.name}' learns from rows of data: expected none, or in a file with stages "
            "only in those that explore"
        )
    lacking = ["sampler_logprobs"]
    lacking += ["old_logprobs"] if recipe.bypass_old_logprobs else []
    lacking += ["advantages", "returns"] if recipe.token_advantage is None else []
    asked = recipe.policy_loss.data()
    if missing := next((column for column in lacking if asked.get(column) is False), None):
        raise ValueError(
            f"algorithm.policy_loss_fn is '{recipe.policy_loss_fn}', which asks for '{missing}', "
            f"and '{recipe.name}' learns from rows of data, which have none: expected a loss such "
            "as 'sft'"
        )


def _refuse_idle_advantage(recipe: Recipe) -> None:
    """Raise ValueError for an advantage that nothing computes or reads, for rows of data."""
    reads = recipe.policy_loss.data().keys() & {"advantages", "returns"}
    if recipe.token_advantage is None or not reads:
        raise ValueError(
            f"algorithm.advantage_fn is '{recipe.advantage_fn}', and '{recipe.name}' learns from "
            f"rows of data by {recipe.policy_loss.label}, without advantages: expected none"
        )


def _check_resampling(recipe: Recipe) -> None:
    """Raise ValueError for a limit of explore steps that no train batch waits for."""
    if recipe.max_resample_times is None:
        return
    part = recipe.parts["advantage_fn"]
    key, groups = "algorithm.advantage_fn_args.max_resample_times", part.before or part
    limits = f"{key} limits how often groups of equal rewards are sampled anew, and {part.label}"
    if groups.marked("of_experiences"):
        raise ValueError(
            f"{limits} is a class that keeps and leaves out experiences itself, so that none can "
            "be taken back at the limit: expected none, or an advantage that is a function "
            "(docs/algorithms.md)"
        )
    known = parameters_of(groups.function).get("std_threshold")
    if known is None and groups.name not in ADVANTAGES.built_in():
        raise ValueError(
            f"{limits} has no option std_threshold, by which it would say that it leaves them out: "
            "expected one (std_threshold: float | None = 0.0), or none here"
        )
    if known is None or groups.options.get("std_threshold", known.default) is None:
        raise ValueError(
            f"{limits} leaves none out: expected std_threshold: 0 as well (grpo), or "
            "advantage_fn dapo"
        )
    if part.settings["duplicate_experiences"]:
        raise ValueError(
            f"{key} has no effect together with duplicate_experiences, which fills the batch with "
            "copies: expected one of the two"
        )
    if recipe.sample_strategy not in ("default", "warmup"):
        raise ValueError(
            f"{key} has no effect with sample_strategy '{recipe.sample_strategy}', whose batches "
            "are not the buffer's next experiences: expected sample_strategy default"
        )


def _check_teacher(recipe: Recipe) -> None:
    key = "algorithm.teacher_kl_fn"
    if recipe.options.get("teacher_kl_fn") and recipe.teacher_kl_fn == "none":
        raise ValueError(f"{key}_args has no effect without {key}: expected one, such as k2")
    if recipe.teacher and (recipe.from_data or recipe.asks("expert")):
        raise ValueError(
            f"{key} is '{recipe.teacher_kl_fn}': a teacher scores what the policy samples, and "
            f"'{recipe.name}' learns from rows of data: expected none"
        )
    if recipe.needs_teacher and _brings_expert(recipe):
        asked = f"{key} '{recipe.teacher_kl_fn}'" if recipe.teacher else f"'{recipe.name}'"
        raise ValueError(
            f"algorithm.sample_strategy '{recipe.sample_strategy}' brings an expert's rows, and "
            f"the teacher of {asked} scores only what the policy samples: expected 'default'"
        )


def _brings_expert(recipe: Recipe) -> bool:
    """True if the sample strategy mixes an expert's rows into a batch."""
    return "expert_data_ratio" in parameters_of(recipe.parts["sample_strategy"].function)


def _refuse_switches_of_tokens(recipe: Recipe, part: Part) -> None:
    """Raise ValueError for options that would select or weigh tokens of a loss that is an average:
    they would scale the average, and every token would keep its gradient.
    """
    averages = f"{part.label} is a class whose loss is an average over its tokens"
    of_policy = part is recipe.policy_loss
    correction = recipe.correction.options if recipe.correction and of_policy else {}
    chosen = [name for name in ("rollout_is", "rollout_rs") if correction.get(name)]
    if chosen:
        raise ValueError(
            f"algorithm.rollout_correction.{chosen[0]} weighs single tokens, and {averages}: "
            "expected none, or a loss that is a function (docs/algorithms.md)"
        )
    if recipe.top_entropy < 1 and of_policy:
        raise ValueError(
            f"algorithm.policy_loss_fn_args.top_entropy_quantile chooses tokens, and {averages}: "
            "expected 1, or a loss that is a function (docs/algorithms.md)"
        )
    if _brings_expert(recipe):
        raise ValueError(
            f"algorithm.sample_strategy '{recipe.sample_strategy}' brings an expert's rows, which "
            f"are averaged by themselves, and {averages}: expected 'default', or a loss that is a "
            "function (docs/algorithms.md)"
        )
    if recipe.loss_agg_mode not in ("token-mean", "seq-mean-token-mean"):
        raise ValueError(
            f"algorithm.loss_agg_mode is '{recipe.loss_agg_mode}', and {averages}: expected "
            "'token-mean' or 'seq-mean-token-mean'"
        )

"""Recipe: makes the algorithm of a stage, and adds the facts that it gives."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trireme.algorithms.part import PARTS
from trireme.algorithms.recipes import Recipe, get_recipe, row_of
from trireme.config import Findings
from trireme.config.stages import StageFacts
from trireme.launch.parts import tried
from trireme.model.tool_calls import format_of


def make_recipe(stage: StageFacts) -> tuple[tuple[StageFacts, Recipe | None], Findings]:
    """Make the algorithm, and add the facts that it gives to those of the stage."""
    findings, config, algorithm = Findings(), stage.config, stage.config.algorithm
    if (row := tried(findings, lambda: row_of(algorithm.algorithm_type))) is None:
        return (stage, None), findings
    if "repeat_times" not in algorithm.model_fields_set:
        algorithm = algorithm.model_copy(update={"repeat_times": row.group_size})
        config = config.model_copy(update={"algorithm": algorithm})
    stage = replace(
        stage,
        config=config,
        reads_file=row.from_data,
        whole_steps=(algorithm.sample_strategy or row.sample_strategy) == "explore_step",
    )
    for kind, registry in PARTS.items():
        get = partial(registry.get, getattr(algorithm, kind), kind=f"algorithm.{kind}")
        tried(findings, get)
    if findings.problems:
        return (stage, None), findings
    parser = config.explorer.rollout_model.tool_call_parser
    tried(findings, partial(format_of, parser), "explorer.rollout_model.tool_call_parser")
    recipe = tried(findings, lambda: get_recipe(algorithm))
    if recipe is None:
        return (stage, None), findings
    for kind in recipe.unused_options:
        findings.note(f"algorithm.{kind}_args: without effect, since {kind} is none")
    if recipe.weighs_by_length:
        findings.note(
            f"algorithm.loss_agg_mode ({recipe.loss_agg_mode}): {recipe.policy_loss.label} is a "
            "loss of whole samples, whose paper averages by 'seq-mean-token-mean'; here longer "
            "ones weigh more"
        )
    stage = replace(
        stage,
        expert_ratio=tried(findings, lambda: recipe.expert_ratio),
        has_reference=recipe.needs_reference,
        has_entropy=recipe.entropy is not None,
        has_critic=recipe.needs_critic,
        needs_teacher=recipe.needs_teacher,
        resamples=recipe.max_resample_times,
    )
    explores = config.mode not in ("train", "serve", "bench")  # for a trainer
    if recipe.needs_groups and algorithm.repeat_times < 2 and explores:
        findings.problem(
            "algorithm.repeat_times",
            f"is {algorithm.repeat_times}: expected at least 2, since {recipe.name} compares the "
            "rollouts of one task",
        )
    return (stage, recipe), findings

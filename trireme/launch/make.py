"""Make: makes what this machine has of a stage's parts, and collects what is wrong with them.

The order is that of the facts: the algorithm tells which tasks and data are read, and how many rows
there are tells the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trireme.algorithms.part import PARTS
from trireme.algorithms.recipes import get_recipe, row_of
from trireme.config.check import (
    check_algorithm,
    check_auxiliary_models,
    check_model,
    check_tasksets,
)
from trireme.config.engine_kind import check_engine_types
from trireme.config.external import check_external
from trireme.config.launcher import check_launcher
from trireme.config.stages import StageFacts, with_inputs
from trireme.extensions import missing
from trireme.launch.operators import try_operators
from trireme.launch.parts import Parts
from trireme.launch.read import check_template, make_tasksets, read_experts, read_train_data
from trireme.model.tool_calls import format_of


def make_parts(
    stage: StageFacts, notes: Sequence[str] = (), *, names_are_known: bool = True
) -> Parts:
    """Make those parts of a stage that this machine can make.

    `notes`: notes on the whole file, if they are shown with this stage. `names_are_known`: the
    plug-ins are loaded; if not, nothing is made by name.
    """
    stage, findings = with_inputs(stage)
    findings.notes += notes
    parts = Parts(stage, findings)
    if lacks := missing("mode", stage.config.mode):
        findings.problem("mode", f"is {stage.config.mode}, which {lacks}")
    if names_are_known:
        findings.add(check_launcher(stage.config.cluster.launcher))
        findings.add(check_engine_types(stage))
        _make_recipe(parts)
    stage = parts.stage
    findings.add(check_algorithm(stage))
    if stage.config.mode not in ("train", "serve") or stage.evaluates:
        findings.add(check_tasksets(stage))
        make_tasksets(parts, names_are_known)
    read_train_data(parts)
    read_experts(parts)
    if names_are_known:
        try_operators(parts)
    findings.add(check_external(stage))
    model, model_findings = check_model(stage)
    findings.problems += model_findings.problems
    parts.file_notes += model_findings.notes
    if model is not None:
        check_template(parts, model)
    findings.add(check_auxiliary_models(stage))
    return parts


def _make_recipe(parts: Parts) -> None:
    """Make the algorithm, and note the facts that the Plan needs from it."""
    stage, algorithm = parts.stage, parts.stage.config.algorithm
    if (row := parts.tried(lambda: row_of(algorithm.algorithm_type))) is None:
        return
    config, findings = stage.config, parts.findings
    if "repeat_times" not in algorithm.model_fields_set:
        algorithm = algorithm.model_copy(update={"repeat_times": row.group_size})
        config = config.model_copy(update={"algorithm": algorithm})
    parts.stage = stage = replace(
        stage,
        config=config,
        reads_file=row.from_data,
        whole_steps=(algorithm.sample_strategy or row.sample_strategy) == "explore_step",
    )
    before = len(findings.problems)
    for kind, registry in PARTS.items():
        parts.tried(partial(registry.get, getattr(algorithm, kind), kind=f"algorithm.{kind}"))
    if len(findings.problems) > before:
        return
    parser = stage.config.explorer.rollout_model.tool_call_parser
    parts.tried(partial(format_of, parser), "explorer.rollout_model.tool_call_parser")
    recipe = parts.recipe = parts.tried(lambda: get_recipe(algorithm))
    if recipe is None:
        return
    for kind in recipe.unused_options:
        findings.note(f"algorithm.{kind}_args: without effect, since {kind} is none")
    if recipe.weighs_by_length:
        findings.note(
            f"algorithm.loss_agg_mode ({recipe.loss_agg_mode}): {recipe.policy_loss.label} is a "
            "loss of whole samples, whose paper averages by 'seq-mean-token-mean'; here longer "
            "ones weigh more"
        )
    parts.stage = replace(
        stage,
        expert_ratio=parts.tried(lambda: recipe.expert_ratio),
        has_reference=recipe.needs_reference,
        has_critic=recipe.needs_critic,
        needs_teacher=recipe.needs_teacher,
        resamples=recipe.max_resample_times,
    )
    explores = stage.config.mode not in ("train", "serve")
    if recipe.needs_groups and algorithm.repeat_times < 2 and explores:
        findings.problem(
            "algorithm.repeat_times",
            f"is {algorithm.repeat_times}: expected at least 2, since {recipe.name} compares the "
            "rollouts of one task",
        )

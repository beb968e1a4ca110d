"""Make: makes the parts of a stage that this machine has, and returns what is wrong with them.

Facts are made in this order: the algorithm determines which tasks and data are read, and the number
of their rows determines the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trireme.algorithms.part import PARTS
from trireme.algorithms.recipes import Recipe, get_recipe, row_of
from trireme.config import Findings
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
from trireme.launch.operators import check_operators
from trireme.launch.parts import Parts, tried
from trireme.launch.read import (
    Tasks,
    check_template,
    make_tasksets,
    read_experts,
    read_train_data,
)
from trireme.model.tool_calls import format_of


def make_parts(
    stage: StageFacts, notes: Sequence[str] = (), *, names_are_known: bool = True
) -> tuple[Parts, Findings]:
    """Make those parts of a stage that this machine can make.

    `notes`: notes on the whole file, if they are shown with this stage. `names_are_known`: the
    plug-ins are loaded; if not, nothing is made by name.
    """
    stage, findings = with_inputs(stage)
    findings.notes += notes
    if lacks := missing("mode", stage.config.mode):
        findings.problem("mode", f"is {stage.config.mode}, which {lacks}")
    recipe = None
    if names_are_known:
        findings.add(check_launcher(stage.config.cluster.launcher))
        findings.add(check_engine_types(stage))
        stage, recipe = findings.take(make_recipe(stage))
    findings.add(check_algorithm(stage))
    tasks = Tasks()
    if stage.config.mode not in ("train", "serve") or stage.evaluates:
        findings.add(check_tasksets(stage))
        tasks, found = make_tasksets(stage, recipe, names_are_known)
        findings.add(found.shown_last())
        stage = replace(
            stage,
            one_experience=tasks.one_experience,
            task_rows=None if tasks.training is None else len(tasks.training),
            task_steps=None if tasks.training is None else tasks.training.total_steps,
        )
    trained, found = read_train_data(stage, recipe)
    findings.add(found.shown_last())
    if trained is not None and trained.one_each:
        stage = replace(stage, train_rows=len(trained.rows))
    experts, found = read_experts(stage)
    findings.add(found.shown_last())
    if names_are_known:
        findings.add(check_operators(stage, recipe))
    findings.add(check_external(stage))
    model, found = check_model(stage)
    findings.add(found.shown_last())
    if model is not None:
        findings.add(check_template(stage, tasks, model))
    findings.add(check_auxiliary_models(stage))
    data = () if trained is None else (trained.rows,)
    rows = (*tasks.rows, *data, *experts)
    return Parts(stage, recipe, tasks.training, tasks.evaluation, rows), findings


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
        has_critic=recipe.needs_critic,
        needs_teacher=recipe.needs_teacher,
        resamples=recipe.max_resample_times,
    )
    explores = config.mode not in ("train", "serve")
    if recipe.needs_groups and algorithm.repeat_times < 2 and explores:
        findings.problem(
            "algorithm.repeat_times",
            f"is {algorithm.repeat_times}: expected at least 2, since {recipe.name} compares the "
            "rollouts of one task",
        )
    return (stage, recipe), findings

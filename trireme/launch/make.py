"""Make: makes the parts of a stage that this machine has, and returns what is wrong with them.

Facts are made in this order: the algorithm determines which tasks and data are read, and the number
of their rows determines the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from trireme.launch.parts import Parts
from trireme.launch.prompts import check_template
from trireme.launch.read import (
    Tasks,
    make_tasksets,
    read_experts,
    read_train_data,
)
from trireme.launch.recipe import make_recipe


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
        findings.add(check_template(stage, (tasks.training, *tasks.evaluation), model))
    findings.add(check_auxiliary_models(stage))
    data = () if trained is None else (trained.rows,)
    rows = (*tasks.rows, *data, *experts)
    return Parts(stage, recipe, tasks.training, tasks.evaluation, rows), findings

"""Check pipeline: whether the operators that a stage names can be found."""

from __future__ import annotations

from collections.abc import Sequence

from trireme.config.names import check_name
from trireme.config.schema import OperatorConfig
from trireme.config.stages import Stage


def check_pipelines(stage: Stage) -> None:
    """Looks at the operators over experiences, and at those over the tasks' rows."""
    data = stage.config.data_processor
    if stage.config.mode in ("both", "explore", "serve"):
        key = "data_processor.experience_pipeline.operators"
        _check(stage, "experience operator", data.experience_pipeline.operators, key)
    if prepares_tasks(stage) and data.task_pipeline is not None:
        key = "data_processor.task_pipeline.operators"
        _check(stage, "task operator", data.task_pipeline.operators, key)


def prepares_tasks(stage: Stage) -> bool:
    """Whether rows go through operators, so that only the run knows how many there are."""
    tasks = stage.config.data_processor.task_pipeline
    explores = stage.config.mode in ("both", "explore")
    return explores and tasks is not None and bool(tasks.operators)


def _check(stage: Stage, kind: str, operators: Sequence[OperatorConfig], key: str) -> None:
    for place, item in enumerate(operators):
        if not item.name:
            stage.problem(f"{key}[{place}].name", f"is not given: expected an {kind}")
        else:
            check_name(stage, kind, item.name, f"{key}[{place}].name")

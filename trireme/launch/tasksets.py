"""Tasksets: makes a plan's tasks for training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.config.schema import Config
from trireme.config.schema_rollout import DataSelectorConfig, ExperienceBufferConfig, TasksetConfig
from trireme.config.stages import UsedTaskset, used_tasksets
from trireme.data.rows import DataSet, NoRows, Rows, load_rows
from trireme.data.tasksets import Mixture, Taskset, TasksetSettings, check_task
from trireme.pipeline.tasks import prepared, task_operators
from trireme.registry import SOURCES
from trireme.workflows.workflow import resolve


def make_training_taskset(plan: Plan) -> Taskset | Mixture | None:
    """Make the tasks to explore; None in modes that only evaluate or only train."""
    used = [item for item in used_tasksets(plan.config) if not item.is_eval]
    mixed = len(used) > 1
    made = [
        make_taskset(plan.config, item, _prepared(plan, rows_of(item.config), item.name), mixed)
        for item in used
    ]
    return together(plan.config, made) if made else None


def make_eval_tasksets(plan: Plan) -> list[Taskset]:
    """Make all evaluation tasksets of the plan."""
    used = [item for item in used_tasksets(plan.config) if item.is_eval]
    return [make_taskset(plan.config, item, rows_of(item.config)) for item in used]


def together(config: Config, tasksets: Sequence[Taskset]) -> Taskset | Mixture:
    """Return the only taskset, or a mixture of several."""
    if len(tasksets) == 1:
        return tasksets[0]
    buffer = config.buffer
    return Mixture(
        tasksets,
        batch_size=buffer.batch_size,
        total_epochs=buffer.total_epochs,
        total_steps=buffer.total_steps,
    )


def make_taskset(config: Config, used: UsedTaskset, rows: Rows, mixed: bool = False) -> Taskset:
    """Make one taskset of these rows; if it is `mixed`, the mixture makes the batches."""
    buffer, dataset, is_eval = config.buffer, used.config, used.is_eval
    selector = dataset.task_selector or dataset.data_selector
    settings = TasksetSettings(
        name=used.name,
        batch_size=1 if mixed else buffer.batch_size,
        total_epochs=buffer.total_epochs,
        total_steps=None if is_eval else buffer.total_steps,
        workflow=used.workflow,
        workflow_args=dataset.workflow_args,
        reward_fn=used.reward,
        reward_fn_args=used.reward_args,
        format_args=dataset.format.model_dump(),
        rollout_args=dataset.rollout_args.model_dump(),
        repeat_times=dataset.repeat_times if is_eval else config.algorithm.repeat_times,
        # an evaluation runs every row in file order
        selector=DataSelectorConfig(seed=selector.seed) if is_eval else selector,
        is_eval=is_eval,
        taskset_id=used.number,
        reads_prompt=not _is_known(used.workflow) or resolve(used.workflow).reads_prompt,
    )
    return Taskset(rows, settings)


def _is_known(workflow: Any) -> bool:
    """Return True if the workflow exists; a missing one is reported elsewhere."""
    try:
        return workflow is not None and resolve(workflow) is not None
    except (ValueError, ImportError):
        return False


def rows_of(config: TasksetConfig | ExperienceBufferConfig) -> Rows:
    """Read the rows of a data set; of a taskset with `on_error: skip`, only those that can be
    tasks.
    """
    data = data_set(config)
    if isinstance(config, ExperienceBufferConfig):
        return load_rows(data.path, data.subset, data.split, on_error=data.on_error)
    if config.storage_type == "sql" and not SOURCES.get("sql")().takes(data):
        raise NoRows(
            config.path, "is not a database: expected sqlite:///<file> or postgresql://..."
        )
    rows = load_rows(
        data.path, data.subset, data.split, on_error=data.on_error, otherwise=data.otherwise
    )
    if config.on_error == "fail":
        return rows  # the taskset checks a whole column at once
    # the taskset refuses a data set without the column, if its workflow reads that
    prompt = config.format.prompt_key if config.format.prompt_key in rows.columns else None
    selector = config.task_selector or config.data_selector
    return rows.checked(lambda row: check_task(row, prompt, selector.feature_keys), "skip")


def data_set(config: TasksetConfig | ExperienceBufferConfig) -> DataSet:
    """Find the data set that a section names; a taskset's name may be that of a database table."""
    name = (config.name or None) if isinstance(config, TasksetConfig) else None
    return DataSet(config.path or "", config.subset_name, config.split, config.on_error, name)


def _prepared(plan: Plan, rows: Rows, name: str) -> Rows:
    operators = [(item.name, item.args) for item in task_operators(plan.config).values()]
    return prepared(rows, operators, JobFolder(plan.job_dir).buffer, name) if operators else rows

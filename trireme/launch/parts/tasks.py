"""Tasks: the tasksets of a plan, to learn from and to measure with."""

from __future__ import annotations

import dataclasses
from typing import Any

from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.config.generated import COLUMNS, generated
from trireme.config.schema import TasksetConfig
from trireme.data.mixture import Mixture
from trireme.data.rows import Rows, load_rows
from trireme.data.tasksets import Taskset, check_task
from trireme.envs.extras import refuse_missing
from trireme.pipeline.tasks import prepared
from trireme.rewards.reward import resolve as resolve_reward
from trireme.workflows.workflow import resolve


def make_training_taskset(plan: Plan) -> Taskset | Mixture | None:
    """The tasks to explore; None in the modes that only measure or only train."""
    inputs = plan.config.buffer.explorer_input
    configs = [inputs.taskset] if inputs.taskset is not None else inputs.tasksets
    if plan.mode not in ("both", "explore") or not configs:
        return None
    if len(configs) == 1:
        return make_taskset(plan, configs[0], place=0, is_eval=False)
    return Mixture(
        [make_taskset(plan, c, place=i, is_eval=False, mixed=True) for i, c in enumerate(configs)],
        batch_size=plan.batch_size,
        total_epochs=plan.config.buffer.total_epochs,
        total_steps=plan.explore_steps,
    )


def make_eval_tasksets(plan: Plan) -> list[Taskset]:
    """All evaluation tasksets of the plan."""
    configs = plan.config.buffer.explorer_input.eval_tasksets if plan.mode != "serve" else []
    return [make_taskset(plan, c, place=i, is_eval=True) for i, c in enumerate(configs)]


def make_taskset(
    plan: Plan, config: TasksetConfig, *, place: int, is_eval: bool, mixed: bool = False
) -> Taskset:
    """Rows and defaults of one taskset; of one that is `mixed`, batches are not its own matter."""
    inputs = plan.config.buffer.explorer_input
    workflow = config.default_workflow_type
    if is_eval:
        workflow = workflow or inputs.default_eval_workflow_type
    selector = config.task_selector or config.data_selector
    name = config.name or (f"eval_taskset_{place}" if is_eval else f"taskset_{place}")
    rows = _rows(config)
    return Taskset(
        rows if is_eval else _prepared(plan, rows, name),
        name=name,
        batch_size=1 if mixed else plan.batch_size,
        total_epochs=plan.config.buffer.total_epochs,
        total_steps=None if is_eval else plan.explore_steps,
        workflow=workflow or inputs.default_workflow_type,
        workflow_args=config.workflow_args,
        reward_fn=config.default_reward_fn_type or inputs.default_reward_fn_type,
        reward_fn_args=config.reward_fn_args,
        format_args=dataclasses.asdict(config.format),
        rollout_args=dataclasses.asdict(config.rollout_args),
        repeat_times=config.repeat_times if is_eval else plan.repeat_times,
        # an evaluation tries every row, in the rows' own order
        selector="sequential" if is_eval else selector.selector_type,
        seed=selector.seed,
        feature_keys=() if is_eval else selector.feature_keys,
        selector_args={} if is_eval else selector.kwargs,
        is_eval=is_eval,
        taskset_id=place,
    )


def _rows(config: TasksetConfig) -> Rows:
    """Rows of a data set that is read, or of one that is made."""
    if generated(config.path) is not None:
        from trireme.envs.reasoning_gym import problems

        made: Any = problems(config.path)
        return Rows(f"dataset '{config.path}'", made, COLUMNS)
    rows = load_rows(config.path, config.subset_name, config.split, on_error=config.on_error)
    if config.on_error == "fail":
        return rows  # the taskset looks at a whole column at once
    prompt = config.format.prompt_key
    selector = config.task_selector or config.data_selector
    return rows.checked(lambda row: check_task(row, prompt, selector.feature_keys), "skip")


def _prepared(plan: Plan, rows: Rows, name: str) -> Rows:
    """What the task pipeline leaves of the rows."""
    tasks = plan.config.data_processor.task_pipeline
    given = [(item.name, item.args) for item in tasks.operators] if tasks else []
    return prepared(rows, given, JobFolder(plan.job_dir).buffer, name) if given else rows


def examine_taskset(taskset: Taskset | Mixture, *, greedy_run: bool = False) -> None:
    """Raise ValueError where a workflow or reward of the tasks is unknown or has other options.

    `greedy_run`: one of a task's rollouts samples otherwise than the rest.
    """
    seen = set()
    for task in taskset.all():
        if (kind := f"{task.workflow} {task.reward_fn}") not in seen:
            seen.add(kind)
            spec = resolve(task.workflow)
            if greedy_run and spec.can_repeat and not task.is_eval:
                raise ValueError(
                    f"workflow '{spec.name}' makes all rollouts of a task in one call, and the "
                    "algorithm needs a greedy one among them: take another algorithm than remax"
                )
            refuse_missing(spec.needs(task))
            examine = spec.examine
            if examine is not None:
                examine(task)
            else:
                resolve_reward(task.reward_fn, task.reward_fn_args)

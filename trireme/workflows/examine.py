"""Examine: checks that workflows and rewards of a taskset's tasks can work, before any is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trireme.algorithms.recipes import Recipe
from trireme.config import Plan
from trireme.data.tasksets import Mixture, Taskset
from trireme.envs.env import refuse_missing
from trireme.model.chat_tokens import as_given
from trireme.registry import REWARDS
from trireme.rewards.grouped import is_grouped
from trireme.rewards.reward import resolve as resolve_reward
from trireme.task import Task, without_effect
from trireme.workflows.workflow import WorkflowSpec, resolve


def examine_taskset(taskset: Taskset | Mixture, plan: Plan, recipe: Recipe) -> None:
    """Raise ValueError if a workflow or reward of the tasks does not take its options, or cannot
    work, or does not fit the algorithm.
    """
    kinds = taskset.kinds()
    for task in kinds:
        spec = resolve(task.workflow)
        if recipe.greedy_run and spec.can_repeat and not task.is_eval:
            raise ValueError(
                f"workflow '{spec.name}' makes all rollouts of a task in one call, and the "
                "algorithm needs a greedy one among them: take another algorithm than remax"
            )
        asks = getattr(spec.code, "asks_a_model", None)
        if asks is not None and asks(task) and not plan.config.explorer.auxiliary_models:
            raise ValueError(
                f"workflow '{spec.name}' asks the first of explorer.auxiliary_models, which is "
                "empty: add a model"
            )
        unjudged = getattr(spec.code, "has_no_reward", None)
        if (
            recipe.rewards_teach
            and unjudged is not None
            and not plan.engine.urls
            and unjudged(task)
        ):
            raise ValueError(
                f"workflow '{spec.name}' has neither a reward nor a scheduler that gives one, and "
                f"algorithm_type {plan.config.algorithm.algorithm_type} learns from rewards: set "
                "default_reward_fn_type of its taskset, or reward_fn_args.funcs"
            )
        refuse_missing(spec.needs(task))
        spec.refuse_unused(task)
        if spec.examine is not None:
            spec.examine(task)
        elif not is_grouped(task.reward_fn, task.reward_fn_args):
            resolve_reward(task.reward_fn, task.reward_fn_args)
    if any(getattr(resolve(task.workflow).code, "examines_rows", False) for task in kinds):
        _examine_rows(taskset)


def _examine_rows(taskset: Taskset | Mixture) -> None:
    """Raise ValueError for the first row that its workflow cannot play, with its place."""
    specs: dict[Any, WorkflowSpec] = {}
    for one in taskset.tasksets if isinstance(taskset, Mixture) else [taskset]:
        for index, task in enumerate(one.all()):
            if task.workflow not in specs:
                specs[task.workflow] = resolve(task.workflow)
            spec = specs[task.workflow]
            if spec.examine is None or not getattr(spec.code, "examines_rows", False):
                continue
            try:
                spec.examine(task)
            except ValueError as error:
                raise ValueError(f"{one.rows.where(index)}: {error}") from error


def first_messages(
    task: Task,
    read: Callable[[Any], Any] = as_given,
) -> tuple[list[dict[str, Any]], Any] | None:
    """Return the messages and tools of a task's first call; None if only its workflow knows.
    `read` reads pictures; by default they stay as the row has them.

    Raises ValueError if its workflow cannot make any from the row.
    """
    spec = resolve(task.workflow)
    return None if spec.first_prompt is None else spec.first_prompt(task, read)


def unread_arguments(task: Task) -> dict[str, str]:
    """Return the options of `workflow_args` that one of the kernel's workflows has not read when it
    has made the first prompt of a task: it reads none later. Each has the nearest one that it asked
    for, or "". Empty for other workflows, and for a user's reward.
    """
    reward = task.reward_fn
    if isinstance(reward, str):
        reward = REWARDS.get(reward)
    ours = "trireme.workflows.", "trireme.rewards."
    for code in (resolve(task.workflow).code, *([] if reward is None else [reward])):
        if not str(getattr(code, "__module__", "")).startswith(ours):
            return {}
    return without_effect([task])

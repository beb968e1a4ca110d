"""Used: which tasksets a stage uses, with which workflow and reward, and what their files tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trireme.config.schema import Config, TasksetConfig
from trireme.config.stages import reads_file


@dataclass
class StageFacts:
    """What the look at the files told; None: only loading will tell."""

    task_rows: int | None = None
    task_path: str = ""
    train_rows: int | None = None
    train_path: str = ""
    workflows: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class UsedTaskset:
    """One taskset with its key and the workflow and reward that it ends up with."""

    key: str
    taskset: TasksetConfig
    is_eval: bool
    workflow: str | None
    reward: str | None


def remote(config: Config) -> bool:
    """Whether rollout servers generate; a stage that reads data evaluates in its own process."""
    return config.explorer.rollout_model.engine_type == "remote" and not reads_file(config)


def evaluates(config: Config) -> bool:
    """Whether evaluation tasksets are tried; a trainer that waits for explorers has no engine."""
    alone = config.mode == "train" and not reads_file(config)
    return not alone and bool(config.buffer.explorer_input.eval_tasksets)


def used_tasksets(config: Config) -> Iterator[UsedTaskset]:
    """Training sets first, then evaluation sets; what they do not name falls back."""
    given = config.buffer.explorer_input
    base = "buffer.explorer_input"
    training = [(f"{base}.taskset", given.taskset)] if given.taskset else []
    training += [(f"{base}.tasksets[{i}]", t) for i, t in enumerate(given.tasksets)]
    if config.mode in ("bench", "train"):
        training = []
    for key, taskset in training:
        workflow = taskset.default_workflow_type or given.default_workflow_type
        reward = taskset.default_reward_fn_type or given.default_reward_fn_type
        yield UsedTaskset(key, taskset, False, workflow, reward)
    for index, taskset in enumerate(given.eval_tasksets):
        workflow = (
            taskset.default_workflow_type
            or given.default_eval_workflow_type
            or given.default_workflow_type
        )
        reward = taskset.default_reward_fn_type or given.default_reward_fn_type
        yield UsedTaskset(f"{base}.eval_tasksets[{index}]", taskset, True, workflow, reward)

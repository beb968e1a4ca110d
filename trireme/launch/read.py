"""Read: makes the tasksets and data of a stage whose rows are on this machine.

Nothing is downloaded here: of a data set that is elsewhere, only the names that it uses are looked
up.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from trireme.algorithms.recipes import Recipe
from trireme.config import Findings
from trireme.config.check import check_experts
from trireme.config.schema_rollout import ExperienceBufferConfig, TasksetConfig
from trireme.config.stages import StageFacts, UsedTaskset, used_tasksets
from trireme.data.kinds import FORMATS
from trireme.data.rows import Rows, is_remote
from trireme.data.tasksets import Mixture, Taskset
from trireme.launch.parts import tried
from trireme.launch.tasksets import data_set, make_taskset, rows_of, together
from trireme.rewards.grouped import refuse_reward
from trireme.workflows.workflow import resolve


class Tasks(NamedTuple):
    """The tasksets of a stage."""

    training: Taskset | Mixture | None = None
    """None if one of them is not on this machine."""
    evaluation: tuple[Taskset | None, ...] = ()
    rows: tuple[Rows, ...] = ()
    one_experience: bool = False
    """Whether each training rollout leaves exactly one experience."""


class TrainData(NamedTuple):
    """The data set that the trainer reads itself."""

    rows: Rows
    one_each: bool
    """Whether each row is one experience."""


def make_tasksets(
    stage: StageFacts, recipe: Recipe | None, names_are_known: bool
) -> tuple[Tasks, Findings]:
    """Make the tasksets whose rows are on this machine; of the others, check the names that they
    use.
    """
    findings = Findings()
    used = used_tasksets(stage.config)
    mixed = sum(not item.is_eval for item in used) > 1
    training: list[Taskset | None] = []
    evaluation: list[Taskset | None] = []
    read: list[Rows] = []
    one_experience = True
    for item in used:
        rows = findings.take(_read(item.key, item.config))
        read += [] if rows is None else [rows]
        taskset = None
        if rows is not None and names_are_known and (item.is_eval or not stage.prepares_tasks):
            make = partial(make_taskset, stage.config, item, rows, mixed and not item.is_eval)
            taskset = tried(findings, make, item.key)
            findings.notes += [] if taskset is None else taskset.notes()
            if not item.is_eval and {"chosen", "rejected"} <= set(rows.columns):
                findings.note(_of_pairs(stage, item))
        (evaluation if item.is_eval else training).append(taskset)
        if names_are_known:
            one = findings.take(_check_names(stage, recipe, item, taskset))
            one_experience = one_experience and (item.is_eval or one)
    here, mixture = [taskset for taskset in training if taskset is not None], None
    if here and len(here) == len(training):
        mixture = tried(findings, lambda: together(stage.config, here))
    one_experience = bool(training) and one_experience
    return Tasks(mixture, tuple(evaluation), tuple(read), one_experience), findings


def _of_pairs(stage: StageFacts, used: UsedTaskset) -> str:
    learner = stage.config.algorithm.algorithm_type
    return (
        f"{used.key}.path ({used.config.path}): its rows have chosen and rejected, from which "
        f"algorithm_type dpo learns; {learner} asks their prompts, and a reward scores the replies"
    )


def _read(key: str, data: TasksetConfig | ExperienceBufferConfig) -> tuple[Rows | None, Findings]:
    """Read a data set's rows; None if it is not on this machine (a note) or invalid (a problem)."""
    findings, path = Findings(), data.path
    if not path:
        return None, findings
    if is_remote(data_set(data)):
        findings.note(f"{key}.path ({path}): not on this machine, will be downloaded")
        return None, findings
    return tried(findings, partial(rows_of, data), key), findings


def _check_names(
    stage: StageFacts, recipe: Recipe | None, used: UsedTaskset, taskset: Taskset | None
) -> tuple[bool, Findings]:
    """Return True if each rollout of these tasks leaves one experience. A workflow or reward that
    does not exist is a problem; of those that rows name, the first.
    """
    findings = Findings()
    named = [(used.workflow, used.reward, {})] if used.workflow else []
    if taskset is not None:
        named = [(task.workflow, task.reward_fn, taskset.sources(task)) for task in taskset.kinds()]
    one, models = bool(named), len(stage.config.explorer.auxiliary_models)
    for workflow, reward, sources in named:
        if findings.problems:
            break
        if workflow is None and not used.workflow:
            continue  # a missing name is reported by the YAML's checks
        key = f"{used.key}.{sources.get('reward_fn_key', 'default_reward_fn_type')}"
        named_by = f"{used.key}.{sources.get('workflow_key', 'default_workflow_type')}"
        spec = tried(findings, partial(resolve, workflow), named_by)
        if spec and recipe and recipe.asks("reward_parts") and not used.is_eval:
            label = recipe.parts["advantage_fn"].label
            tried(findings, partial(spec.refuse_no_parts, label), key)
        if spec and reward and not spec.asks_reward and not spec.rewards_itself:
            findings.note(
                f"{key} ({reward}): the workflow '{spec.name}' sets its rewards itself, and asks "
                "this one only if it calls task.reward_fn"
            )
        reward = reward or getattr(getattr(spec, "code", None), "default_reward", None)
        tried(findings, partial(refuse_reward, reward, used.reward_args, models), key)
        one = one and spec is not None and spec.one_experience
    return one, findings


def read_train_data(stage: StageFacts, recipe: Recipe | None) -> tuple[TrainData | None, Findings]:
    """Read the data set that the trainer reads itself."""
    findings = Findings()
    data = stage.config.buffer.trainer_input.experience_buffer
    if recipe is None or not stage.reads_file or not data.path or "://" in data.path:
        return None, findings
    if recipe.schema == "kto" and stage.config.buffer.train_batch_size == 1:
        text = "is 1: KTO compares rows; expected at least 2"
        findings.problem("buffer.train_batch_size", text)
    key = "buffer.trainer_input.experience_buffer"
    rows = findings.take(_read_columns(key, data, recipe.schema))
    if rows is None:
        return None, findings
    return TrainData(rows, FORMATS[recipe.schema].one_each), findings


def read_experts(stage: StageFacts) -> tuple[list[Rows], Findings]:
    """Read the experts' data sets, which are mixed into the trainer's batches."""
    findings, read = check_experts(stage), []
    for name, data in stage.config.buffer.trainer_input.auxiliary_buffers.items():
        key = f"buffer.trainer_input.auxiliary_buffers.{name}"
        rows = findings.take(_read_columns(key, data, "sft"))
        read += [] if rows is None else [rows]
    return read, findings


def _read_columns(
    key: str, data: ExperienceBufferConfig, schema: str
) -> tuple[Rows | None, Findings]:
    """Read a data set whose columns are those of a schema."""
    rows, findings = _read(key, data)
    if rows is not None:
        columns = partial(FORMATS[schema].columns_of, rows, data.format.model_dump())
        tried(findings, columns, key)
    return rows, findings

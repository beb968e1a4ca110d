"""Read: makes the tasksets and data of a stage whose rows are on this machine.

Nothing is downloaded here: of a data set that is elsewhere, only the names that it uses are looked
up.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trireme.config.check import check_experts
from trireme.config.lookup import ModelFacts
from trireme.config.schema_rollout import ExperienceBufferConfig, TasksetConfig
from trireme.config.stages import StageFacts, UsedTaskset, used_tasksets
from trireme.data.kinds import FORMATS
from trireme.data.rows import Rows, is_remote, load_rows
from trireme.data.tasksets import Taskset
from trireme.launch.parts import Parts
from trireme.launch.prompts import first_messages
from trireme.launch.tasksets import data_set, make_taskset, rows_of, together
from trireme.rewards.grouped import refuse_reward
from trireme.workflows.workflow import resolve


def make_tasksets(parts: Parts, names_are_known: bool) -> None:
    """Make the tasksets whose rows are on this machine; of the others, check the names that they
    use.
    """
    stage = parts.stage
    used = used_tasksets(stage.config)
    mixed = sum(not item.is_eval for item in used) > 1
    training: list[Taskset | None] = []
    one_experience = True
    for item in used:
        rows = _read(parts, item.key, item.config)
        taskset = None
        if rows is not None and names_are_known and (item.is_eval or not prepares_tasks(stage)):
            make = partial(make_taskset, stage.config, item, rows, mixed and not item.is_eval)
            taskset = parts.tried(make, item.key)
            if taskset is not None and (note := taskset.answers_note()) is not None:
                parts.file_notes.append(note)
        (parts.evaluation if item.is_eval else training).append(taskset)
        if names_are_known:
            one = _resolve(parts, item, taskset)
            one_experience = one_experience and (item.is_eval or one)
    here = [taskset for taskset in training if taskset is not None]
    if here and len(here) == len(training):
        parts.training = parts.tried(lambda: together(stage.config, here))
    tasks = parts.training
    parts.stage = replace(
        stage,
        one_experience=bool(training) and one_experience,
        task_rows=None if tasks is None else len(tasks),
        task_steps=None if tasks is None else tasks.total_steps,
    )


def prepares_tasks(stage: StageFacts) -> bool:
    """Return True if rows go through operators, so that only the run knows the final rows."""
    tasks = stage.config.data_processor.task_pipeline
    return tasks is not None and bool(tasks.operators)


def _read(parts: Parts, key: str, data: TasksetConfig | ExperienceBufferConfig) -> Rows | None:
    """Read a data set's rows; None if it is not on this machine (a note) or invalid (a problem)."""
    path = data.path
    if not path:
        return None
    if is_remote(data_set(data)):
        note = f"{key}.path ({path}): not on this machine, will be downloaded"
        parts.file_notes.append(note)
        return None
    if isinstance(data, TasksetConfig):
        read = partial(rows_of, data)
    else:
        read = partial(load_rows, path, data.subset_name, data.split, on_error=data.on_error)
    rows = parts.tried(read, key)
    parts.rows += [] if rows is None else [rows]
    return rows


def _resolve(parts: Parts, used: UsedTaskset, taskset: Taskset | None) -> bool:
    """Return True if each rollout of these tasks leaves one experience. A workflow or reward that
    does not exist is a problem.
    """
    named = [(used.workflow, used.reward)] if used.workflow else []
    if taskset is not None:
        named = [(task.workflow, task.reward_fn) for task in taskset.kinds()]
    one, models = bool(named), len(parts.stage.config.explorer.auxiliary_models)
    for workflow, reward in named:
        if workflow is None and not used.workflow:
            continue  # a missing name is reported by the YAML's checks
        key = f"{used.key}.default_reward_fn_type"
        spec = parts.tried(partial(resolve, workflow), f"{used.key}.default_workflow_type")
        recipe = parts.recipe
        if spec and recipe and recipe.asks("reward_parts") and not used.is_eval:
            parts.tried(partial(spec.refuse_no_parts, recipe.parts["advantage_fn"].label), key)
        reward = reward or getattr(getattr(spec, "code", None), "default_reward", None)
        parts.tried(partial(refuse_reward, reward, used.config.reward_fn_args, models), key)
        one = one and spec is not None and spec.one_experience
    return one


def read_train_data(parts: Parts) -> None:
    """Read the data set that the trainer reads itself."""
    stage, recipe = parts.stage, parts.recipe
    data = stage.config.buffer.trainer_input.experience_buffer
    if recipe is None or not stage.reads_file or not data.path or "://" in data.path:
        return
    if recipe.schema == "kto" and stage.config.buffer.train_batch_size == 1:
        text = "is 1: KTO compares rows; expected at least 2"
        parts.findings.problem("buffer.train_batch_size", text)
    rows = _read_data(parts, "buffer.trainer_input.experience_buffer", data, recipe.schema)
    if rows is not None and FORMATS[recipe.schema].one_each:
        parts.stage = replace(stage, train_rows=len(rows))


def read_experts(parts: Parts) -> None:
    """Read the experts' data sets, which are mixed into the trainer's batches."""
    parts.findings.add(check_experts(parts.stage))
    for name, data in parts.stage.config.buffer.trainer_input.auxiliary_buffers.items():
        _read_data(parts, f"buffer.trainer_input.auxiliary_buffers.{name}", data, "sft")


def _read_data(parts: Parts, key: str, data: ExperienceBufferConfig, schema: str) -> Rows | None:
    """Read a data set whose columns are those of a schema."""
    rows = _read(parts, key, data)
    if rows is not None:
        parts.tried(lambda: FORMATS[schema].columns_of(rows, data.format.model_dump()), key)
    return rows


def check_template(parts: Parts, facts: ModelFacts) -> None:
    """Add a problem if a workflow chats with a model that has no chat template."""
    model = parts.stage.config.model
    template = model.custom_chat_template or model.chat_template_path
    if facts.has_chat_template is not False or template:
        return
    for taskset in (parts.training, *parts.evaluation):
        for task in taskset.kinds() if taskset is not None else ():
            asked = parts.tried(lambda task=task: first_messages(task))
            if asked is not None:
                parts.findings.problem(
                    "model.model_path",
                    f"({model.model_path}) has no chat template, which {task.workflow} needs: "
                    "expected a chat model, or model.chat_template_path",
                )
                return

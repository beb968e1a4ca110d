"""Check data: checks that data sets exist, are whole and have their columns; operators too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trireme.config.dataset import DatasetFacts, dataset_facts
from trireme.config.lookup import check_name
from trireme.config.schema_rollout import (
    ExperienceBufferConfig,
    FormatConfig,
    OperatorConfig,
    TasksetConfig,
)
from trireme.config.stages import Stage

_PLAIN = FormatConfig()
_INFERRED: dict[str, tuple[tuple[str, ...], ...]] = {
    "sft": (("messages",), ("message",), ("prompt", "response"), ("question", "answer")),
    "dpo": (("prompt", "chosen", "rejected"), ("messages", "chosen", "rejected")),
    "cpt": (("text",), ("prompt",)),
}
"""What a row is read from where `format` says nothing; SFT also: recorded experiences' tokens."""
JUDGES = ("judge", "ruler", "rubric")
"""Rewards that ask a model."""
_JUDGING = {
    "math_rm_workflow": "judge",
    "async_math_rm_workflow": "judge",
    "math_ruler_workflow": "ruler",
    "async_math_ruler_workflow": "ruler",
    "rubric_judge_workflow": "rubric",
}
"""Workflows whose own reward is such a one."""
_FEATURES = {"offline_easy2hard": range(1, 1000), "difficulty_based": range(2, 3)}
"""How many feature columns a selector needs."""


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


class UsedTaskset(NamedTuple):
    """One taskset with its key and the workflow and reward that it ends up with."""

    key: str
    taskset: TasksetConfig
    is_eval: bool
    workflow: str | None
    reward: str | list[Any] | None


def used_tasksets(stage: Stage) -> Iterator[UsedTaskset]:
    """Training sets first, then evaluation sets; what they do not name falls back."""
    given = stage.config.buffer.explorer_input
    sets = [("taskset", given.taskset, False)] if given.taskset else []
    sets += [(f"tasksets[{i}]", t, False) for i, t in enumerate(given.tasksets)]
    if stage.config.mode in ("bench", "train"):
        sets = []
    sets += [(f"eval_tasksets[{i}]", t, True) for i, t in enumerate(given.eval_tasksets)]
    for key, taskset, is_eval in sets:
        fallback = given.default_eval_workflow_type if is_eval else None
        workflow = taskset.default_workflow_type or fallback or given.default_workflow_type
        reward = taskset.default_reward_fn_type or given.default_reward_fn_type
        yield UsedTaskset(f"buffer.explorer_input.{key}", taskset, is_eval, workflow, reward)


def check_tasksets(stage: Stage) -> None:
    """Looks at every taskset of training and evaluation."""
    given, mode = stage.config.buffer.explorer_input, stage.config.mode
    key = "buffer.explorer_input"
    if given.taskset and given.tasksets:
        stage.problem(key, "has both taskset and tasksets: expected one of them")
    used = list(used_tasksets(stage))
    if mode == "bench" and not used:
        stage.problem(f"{key}.eval_tasksets", "is empty: bench has nothing to measure")
    elif mode in ("both", "explore") and not (given.taskset or given.tasksets):
        stage.problem(f"{key}.taskset", "is not given: expected the tasks to explore")
    rows: list[int | None] = []
    named: dict[tuple[bool, str], str] = {}
    for item in used:
        other = named.setdefault((item.is_eval, item.taskset.name or item.key), item.key)
        if other != item.key:
            text = f"is '{item.taskset.name}', which is that of {other} too: expected its own"
            stage.problem(f"{item.key}.name", text)
        _check_names(stage, item)
        if wrong := [s for s in item.taskset.rollout_args.stop if not 1 <= len(s) <= 1024]:
            text = f"has {wrong[0]!r:.80}: expected texts of 1 to 1024 characters"
            stage.problem(f"{item.key}.rollout_args.stop", text)
        found = _rows(stage, item.key, item.taskset)
        made = prepares_tasks(stage) and not item.is_eval  # operators may make columns
        if found and not made:
            _check_columns(stage, item.key, item.taskset, found, _columns(item.taskset.format))
        if not item.is_eval:
            _check_selector(stage, item, found)
            rows.append(found.rows if found else None)
            stage.workflows.add(item.workflow or "")
            stage.task_paths += filter(None, [item.taskset.path])
    known = [n for n in rows if n is not None]
    whole = bool(rows) and len(known) == len(rows) and not prepares_tasks(stage)
    stage.task_rows = sum(known) if whole else None


def _check_names(stage: Stage, item: UsedTaskset) -> None:
    form = item.taskset.format
    key = f"{item.key}.default_workflow_type"
    if item.workflow:
        check_name(stage, "workflow", item.workflow, key)
    elif not form.workflow_key:
        stage.problem(key, "is not given: expected the workflow that tries these tasks")
    _check_rewards(stage, item)
    if item.workflow == "multi_turn_scheduler":
        _check_scheduler(stage, item)
    # tasks are rendered by the model's own template: one for a data set alone is not read
    for name, instead in (("chat_template", "custom_chat_template"), ("enable_thinking",) * 2):
        if getattr(form, name) is not None:
            text = f"is not supported for tasks: set model.{instead}"
            stage.problem(f"{item.key}.format.{name}", text)


def _check_selector(stage: Stage, item: UsedTaskset, found: DatasetFacts | None) -> None:
    """Whether the selector is there, and the columns that it orders rows by."""
    taskset = item.taskset
    name = "data_selector" if taskset.task_selector is None else "task_selector"
    selector = taskset.task_selector or taskset.data_selector
    key = f"{item.key}.{name}"
    check_name(stage, "data selector", selector.selector_type, f"{key}.selector_type")
    columns = None if found is None else found.columns
    for column in selector.feature_keys:
        if columns is not None and column not in columns:
            stage.problem(
                f"{key}.feature_keys",
                f"has {column!r}, which {taskset.path} does not have: expected some of its "
                f"columns: {', '.join(columns)}",
            )
    wanted = _FEATURES.get(selector.selector_type, ())
    if wanted and len(selector.feature_keys) not in wanted:
        stage.problem(
            f"{key}.feature_keys",
            f"is {selector.feature_keys}: {selector.selector_type} needs "
            + (
                "two columns, a weak and a strong model's pass rates"
                if len(wanted) == 1
                else "the columns of numbers that it orders rows by"
            ),
        )


def _check_scheduler(stage: Stage, item: UsedTaskset) -> None:
    """Whether the scheduler and the reward functions of multi-turn tasks are there."""
    args = item.taskset.workflow_args
    scheduler, turns = args.get("scheduler"), args.get("max_turns")
    if isinstance(scheduler, str):
        key = f"{item.key}.workflow_args.scheduler"
        check_name(stage, "multi-turn scheduler", scheduler, key)
    if turns is not None and (not isinstance(turns, int) or turns < 0):
        key = f"{item.key}.workflow_args.max_turns"
        stage.problem(key, f"is {turns!r}: expected a whole number, 0 for no limit")


def _check_rewards(stage: Stage, item: UsedTaskset) -> None:
    """Whether the rewards are there, and a model for those that ask one."""
    funcs = item.taskset.reward_fn_args.get("funcs")
    given = item.reward if funcs is None else funcs
    key = f"{item.key}.{'default_reward_fn_type' if funcs is None else 'reward_fn_args.funcs'}"
    rewards = given if isinstance(given, list) else [given] if given else []
    one = item.taskset.reward_fn_args if isinstance(given, str) else {}
    if not rewards and item.workflow in _JUDGING:
        rewards, one = [_JUDGING[item.workflow]], item.taskset.reward_fn_args
    for reward in rewards:
        own = reward if isinstance(reward, dict) else {"name": reward, **one}
        name = own.get("name")
        if not isinstance(name, str):
            stage.problem(key, f"has {reward!r}: expected a name, or a section with `name` in it")
            continue
        check_name(stage, "reward", name, key, or_kind="reward function")
        models = len(stage.config.explorer.auxiliary_models)
        if name in JUDGES and not own.get("base_url") and models <= own.get("auxiliary", 0):
            stage.problem(
                "explorer.auxiliary_models",
                f"has {models} models, and the reward '{name}' asks one: add it, or give the "
                "reward base_url and model",
            )


def _rows(
    stage: Stage, key: str, data: TasksetConfig | ExperienceBufferConfig
) -> DatasetFacts | None:
    """What a data set's files tell; None where there are none here, or they are no good."""
    path = data.path
    if not path:
        stage.problem(f"{key}.path", "is not given: expected a file, folder or hub id")
        return None
    try:
        found = dataset_facts(path, data.subset_name, data.split, skip=data.on_error == "skip")
    except ValueError as error:
        stage.problem(f"{key}.path", f"({path}) {error}")
        return None
    if found is None:
        stage.file_notes.append(f"{key}.path ({path}): not on this machine, will be downloaded")
    elif found.rows == 0:
        text = f"({path}) has no rows in split '{data.split}': expected at least one"
        stage.problem(f"{key}.path", text)
        return None
    return found


def _check_columns(
    stage: Stage,
    key: str,
    data: TasksetConfig | ExperienceBufferConfig,
    found: DatasetFacts,
    wanted: Mapping[str, str],
) -> None:
    """Whether the rows have the columns that keys of `format` name."""
    for name, column in wanted.items():
        if found.columns is not None and column not in found.columns:
            stage.problem(
                f"{key}.format.{name}",
                f"is {column!r}, which {data.path} does not have: expected one of its columns: "
                f"{', '.join(found.columns)}",
            )


def _columns(form: FormatConfig) -> dict[str, str]:
    """Keys of `format` that name a column which the rows must have, with that column."""
    names = ("prompt_key", "system_prompt_key", "workflow_key", "reward_fn_key")
    wanted = {name: getattr(form, name) for name in names}
    # rows need no answers: only a column that the user chose must be there
    wanted |= _given(form, "response_key")
    return {name: column for name, column in wanted.items() if column}


def check_train_data(stage: Stage) -> None:
    """Looks at the data set that a trainer reads by itself."""
    data = stage.config.buffer.trainer_input.experience_buffer
    if not data.path or "://" in data.path:
        return
    key = "buffer.trainer_input.experience_buffer"
    found = _rows(stage, key, data)
    if found is None:
        return
    # how many pieces a text gives is known when it is encoded
    stage.train_rows = None if stage.config.algorithm.algorithm_type == "cpt" else found.rows
    _check_form(stage, key, data, found, stage.config.algorithm.algorithm_type)


def check_auxiliary_data(stage: Stage) -> None:
    """Looks at the data sets of experts, whose rows are those of sft."""
    for name, data in stage.config.buffer.trainer_input.auxiliary_buffers.items():
        key = f"buffer.trainer_input.auxiliary_buffers.{name}"
        if data.storage_type not in (None, "file"):
            stage.problem(f"{key}.storage_type", f"is {data.storage_type}: expected file")
        elif found := _rows(stage, key, data):
            _check_form(stage, key, data, found, "sft")
    if stage.expert_ratio is not None and not stage.config.buffer.trainer_input.auxiliary_buffers:
        stage.problem(
            "buffer.trainer_input.auxiliary_buffers",
            f"is empty: {stage.config.algorithm.algorithm_type} needs an expert's data, by the "
            "name sft_dataset",
        )


def _check_form(
    stage: Stage, key: str, data: ExperienceBufferConfig, found: DatasetFacts, schema: str
) -> None:
    """Whether rows have the columns that a data set of this kind is read from."""
    named = _named_columns(data.format, schema)
    _check_columns(stage, key, data, found, named)
    columns, forms = found.columns, _INFERRED[schema]
    if columns is None or named or any(set(names) <= set(columns) for names in forms):
        return
    if schema == "sft" and "tokens" in columns:
        return
    known = ", ".join(" + ".join(names) for names in forms)
    keys = {
        "sft": "messages_key, or prompt_key and response_key",
        "dpo": "prompt_key (or messages_key), chosen_key and rejected_key",
        "cpt": "prompt_key",
    }
    stage.problem(
        f"{key}.format",
        f"is not given, and {data.path} has the columns {', '.join(columns)}, none of {known}: "
        f"expected {keys[schema]}",
    )


def _named_columns(form: FormatConfig, schema: str) -> dict[str, str]:
    """Keys by which the user says what a row is read from; none: it is inferred."""
    if schema != "sft":
        return _named_of_pairs(form) if schema == "dpo" else _given(form, "prompt_key")
    if form.messages_key != _PLAIN.messages_key:
        return {"messages_key": form.messages_key}
    pair = {"prompt_key": form.prompt_key, "response_key": form.response_key}
    plain = {name: getattr(_PLAIN, name) for name in pair}
    return pair if form.prompt_type == "plaintext" or pair != plain else {}


def _named_of_pairs(form: FormatConfig) -> dict[str, str]:
    """The same for pairs: their prompt's column, and those of the two replies."""
    prompt = _given(form, "messages_key") or _given(form, "prompt_key")
    return prompt | _given(form, "chosen_key") | _given(form, "rejected_key")


def _given(form: FormatConfig, name: str) -> dict[str, str]:
    """The key with its column, where the user chose it."""
    column = getattr(form, name)
    return {} if column == getattr(_PLAIN, name) else {name: column}

"""Check data: whether tasksets and data sets are there, whole, and have the columns they need."""

from __future__ import annotations

from trireme.config.dataset import DatasetFacts, dataset_facts
from trireme.config.names import check_name, known_names
from trireme.config.problem import Problem
from trireme.config.schema import Config, FormatConfig, TasksetConfig
from trireme.config.used import StageFacts, UsedTaskset, used_tasksets

_PAIRS = (("prompt", "response"), ("question", "answer"))
_INFERRED = (("messages",), ("message",), *_PAIRS, ("tokens",))
"""What an SFT row is read from where `format` says nothing; the last one: recorded experiences."""


def check_tasksets(config: Config, facts: StageFacts, problems: list[Problem]) -> None:
    """Looks at every taskset of training and evaluation."""
    given = config.buffer.explorer_input
    if given.taskset and given.tasksets:
        problems.append(
            Problem("buffer.explorer_input", "has both taskset and tasksets: expected one of them")
        )
    used = list(used_tasksets(config))
    if config.mode == "bench" and not used:
        problems.append(
            Problem("buffer.explorer_input.eval_tasksets", "is empty: bench has nothing to measure")
        )
    elif config.mode in ("both", "explore") and not (given.taskset or given.tasksets):
        problems.append(
            Problem("buffer.explorer_input.taskset", "is not given: expected the tasks to explore")
        )
    rows: list[int | None] = []
    for item in used:
        _check_names(config, item, problems)
        _check_format(item.key, item.taskset.format, problems)
        found = _check_data(item.key, item.taskset, facts, problems)
        if not item.is_eval:
            rows.append(found.rows if found else None)
            facts.workflows.add(item.workflow or "")
            facts.task_path = ", ".join(filter(None, (facts.task_path, item.taskset.path)))
    known = [n for n in rows if n is not None]
    facts.task_rows = sum(known) if rows and len(known) == len(rows) else None


def _check_format(key: str, form: FormatConfig, problems: list[Problem]) -> None:
    """Tasks are rendered by the model's own template: one for a data set alone is not read."""
    for name, instead in (("chat_template", "custom_chat_template"), ("enable_thinking",) * 2):
        if getattr(form, name) is not None:
            text = f"is not supported for tasks: set model.{instead}"
            problems.append(Problem(f"{key}.format.{name}", text))


def _check_names(config: Config, item: UsedTaskset, problems: list[Problem]) -> None:
    key = f"{item.key}.default_workflow_type"
    if item.workflow:
        check_name("workflow", item.workflow, key, config.plugins, problems)
    elif not item.taskset.format.workflow_key:
        problems.append(Problem(key, "is not given: expected the workflow that tries these tasks"))
    if item.reward:
        check_name(
            "reward", item.reward, f"{item.key}.default_reward_fn_type", config.plugins, problems
        )
    if item.workflow == "multi_turn_scheduler":
        _check_scheduler(config, item, problems)


def _check_scheduler(config: Config, item: UsedTaskset, problems: list[Problem]) -> None:
    """Whether the scheduler and the reward functions of multi-turn tasks are there."""
    plugins, args = config.plugins, item.taskset.workflow_args
    scheduler, turns = args.get("scheduler"), args.get("max_turns")
    if isinstance(scheduler, str):
        key = f"{item.key}.workflow_args.scheduler"
        check_name("multi-turn scheduler", scheduler, key, plugins, problems)
    if turns is not None and (not isinstance(turns, int) or turns < 0):
        key = f"{item.key}.workflow_args.max_turns"
        problems.append(Problem(key, f"is {turns!r}: expected a whole number, 0 for no limit"))
    funcs = item.taskset.reward_fn_args.get("funcs") or ()
    for func in [funcs] if isinstance(funcs, str) else funcs:
        name = func.get("name") if isinstance(func, dict) else func
        if isinstance(name, str) and name not in known_names("reward"):
            key = f"{item.key}.reward_fn_args.funcs"
            check_name("reward function", name, key, plugins, problems)


def _check_data(
    key: str, data: TasksetConfig, facts: StageFacts, problems: list[Problem]
) -> DatasetFacts | None:
    """Looks at a taskset's rows and columns; None where that is not possible."""
    found = _rows(key, data.path, data.subset_name, data.split, facts, problems)
    if found is not None and found.columns is not None:
        for name, column in _columns(data.format).items():
            if column not in found.columns:
                problems.append(
                    Problem(
                        f"{key}.format.{name}",
                        f"is {column!r}, which {data.path} does not have: expected one of its "
                        f"columns: {', '.join(found.columns)}",
                    )
                )
    return found


def _rows(
    key: str,
    path: str,
    subset: str | None,
    split: str,
    facts: StageFacts,
    problems: list[Problem],
) -> DatasetFacts | None:
    if not path:
        problems.append(Problem(f"{key}.path", "is not given: expected a file, folder or hub id"))
        return None
    try:
        found = dataset_facts(path, subset, split)
    except ValueError as error:
        problems.append(Problem(f"{key}.path", f"({path}) {error}"))
        return None
    if not found.found:
        facts.notes.append(f"{key}.path ({path}): not on this machine, will be downloaded")
    if found.rows == 0:
        problems.append(
            Problem(
                f"{key}.path", f"({path}) has no rows in split '{split}': expected at least one"
            )
        )
        return None
    return found


def _columns(form: FormatConfig) -> dict[str, str]:
    """Keys of `format` that name a column which the rows must have, with that column."""
    wanted = {
        "prompt_key": form.prompt_key,
        "response_key": form.response_key,
        "system_prompt_key": form.system_prompt_key or "",
        "workflow_key": form.workflow_key,
        "reward_fn_key": form.reward_fn_key,
    }
    # rows need no answers: only a column that the user chose must be there
    if form.response_key == FormatConfig().response_key:
        del wanted["response_key"]
    return {name: column for name, column in wanted.items() if column}


def check_train_data(config: Config, facts: StageFacts, problems: list[Problem]) -> None:
    """Looks at the data set that a trainer reads by itself."""
    buffer = config.buffer.trainer_input.experience_buffer
    if not buffer.path or "://" in buffer.path:
        return
    key = "buffer.trainer_input.experience_buffer"
    found = _rows(key, buffer.path, buffer.subset_name, buffer.split, facts, problems)
    facts.train_path = buffer.path
    facts.train_rows = found.rows if found else None
    if found is None or found.columns is None:
        return
    there = ", ".join(found.columns)
    named = _named_columns(buffer.format)
    for name, column in named.items():
        if column not in found.columns:
            problems.append(
                Problem(
                    f"{key}.format.{name}",
                    f"is {column!r}, which {buffer.path} does not have: expected one of its "
                    f"columns: {there}",
                )
            )
    if not named and not any(set(columns) <= set(found.columns) for columns in _INFERRED):
        known = ", ".join(" + ".join(columns) for columns in _INFERRED[:-1])
        problems.append(
            Problem(
                f"{key}.format",
                f"is not given, and {buffer.path} has the columns {there}, none of {known}: "
                f"expected messages_key, or prompt_key and response_key",
            )
        )


def _named_columns(form: FormatConfig) -> dict[str, str]:
    """Keys by which the user says what an SFT row is read from; none: it is inferred."""
    plain = FormatConfig()
    if form.messages_key != plain.messages_key:
        return {"messages_key": form.messages_key}
    pair = {"prompt_key": form.prompt_key, "response_key": form.response_key}
    if form.prompt_type == "plaintext" or any(
        column != getattr(plain, name) for name, column in pair.items()
    ):
        return pair
    return {}

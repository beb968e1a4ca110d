"""Data: makes a plan's tokenizer, tasksets and buffers.

These are the tokenizer and chat template, the tasksets for training and evaluation, the buffers,
and the operators on the way to them. All decisions are the Plan's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trireme.buffer.buffer import Buffer
from trireme.buffer.store import StoreParts, copy_limits
from trireme.buffer.trained import TrainedTokens
from trireme.checkpoint.layout import EVALUATED, JobFolder
from trireme.config import Plan
from trireme.config.schema import Config
from trireme.config.schema_rollout import DataSelectorConfig, ExperienceBufferConfig, TasksetConfig
from trireme.config.stages import UsedTaskset, used_tasksets
from trireme.config.store import store_named
from trireme.data.rows import DataSet, NoRows, Rows, load_rows
from trireme.data.tasksets import Mixture, Taskset, TasksetSettings, check_task
from trireme.envs.env import refuse_missing
from trireme.files import read_text
from trireme.model.chat_tokens import ChatTokens
from trireme.pipeline.operators import Operator, make_operator
from trireme.pipeline.tasks import prepared, task_operators
from trireme.registry import OPERATORS, SOURCES
from trireme.rewards.reward import resolve as resolve_reward
from trireme.workflows.workflow import resolve

if TYPE_CHECKING:
    from trireme.buffer.record import Record

OPERATORS_KEY = "data_processor.experience_pipeline.operators"


@dataclass(frozen=True)
class Text:
    """The tokenizer, and the rules that turn conversations into tokens."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatTokens
    template: str | None
    """The chat template from the YAML; None: the model's own."""


def make_text(plan: Plan, model_path: str) -> Text:
    """Make the model's tokenizer, with its chat template or the YAML's; a stand-in for an API,
    which receives messages.
    """
    model = plan.config.model
    if plan.api is not None:
        return Text(tokenizer := plan.api.tokenizer(), ChatTokens(tokenizer), None)
    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=model.trust_remote_code)
    template = chat_template_of(plan)
    chat = ChatTokens(
        tokenizer,
        chat_template=template,
        enable_thinking=model.enable_thinking,
        tool_call_parser=plan.config.explorer.rollout_model.tool_call_parser,
        reasoning_parser=plan.config.explorer.rollout_model.reasoning_parser,
    )
    return Text(tokenizer, chat, template)


def chat_template_of(plan: Plan) -> str | None:
    """Return the YAML's chat template, given as text or as a file; None: the model's own."""
    model = plan.config.model
    if model.custom_chat_template is None and model.chat_template_path:
        return read_text(Path(model.chat_template_path))
    return model.custom_chat_template


def end_ids_of(model_path: str, text: Text) -> Collection[int]:
    """Return the ids that end the model's generation: supervised replies must end with one."""
    from trireme.engines.torch.shell import end_tokens_of  # takes 1 s, and `check` does not need it

    return end_tokens_of(model_path, text.tokenizer)


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
        reward_fn_args=dataset.reward_fn_args,
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


def rows_of(config: TasksetConfig) -> Rows:
    """Read the rows of a taskset's data set; with `on_error: skip`, only rows that can be tasks."""
    data = data_set(config)
    if config.storage_type == "sql" and not SOURCES.get("sql")().takes(data):
        raise NoRows(config.path, "is no database: expected sqlite:///<file> or postgresql://...")
    rows = load_rows(
        data.path, data.subset, data.split, on_error=data.on_error, otherwise=data.otherwise
    )
    if config.on_error == "fail":
        return rows  # the taskset checks a whole column at once
    prompt = config.format.prompt_key
    selector = config.task_selector or config.data_selector
    return rows.checked(lambda row: check_task(row, prompt, selector.feature_keys), "skip")


def data_set(config: TasksetConfig | ExperienceBufferConfig) -> DataSet:
    """Find the data set that a section names; a taskset's name may be that of a database table."""
    name = (config.name or None) if isinstance(config, TasksetConfig) else None
    return DataSet(config.path or "", config.subset_name, config.split, config.on_error, name)


def _prepared(plan: Plan, rows: Rows, name: str) -> Rows:
    operators = [(item.name, item.args) for item in task_operators(plan.config).values()]
    return prepared(rows, operators, JobFolder(plan.job_dir).buffer, name) if operators else rows


def examine_taskset(
    taskset: Taskset | Mixture,
    plan: Plan,
    *,
    greedy_run: bool = False,
    rewards_teach: bool = False,
) -> None:
    """Raise ValueError if a workflow or reward of the tasks does not take its options, or cannot
    work.

    `greedy_run`: one rollout of each task samples differently from the rest. `rewards_teach`: the
    algorithm needs a reward for each rollout.
    """
    for task in taskset.kinds():
        spec = resolve(task.workflow)
        if greedy_run and spec.can_repeat and not task.is_eval:
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
        if rewards_teach and unjudged is not None and not plan.engine.urls and unjudged(task):
            raise ValueError(
                f"workflow '{spec.name}' has neither a reward nor a scheduler that gives one, and "
                f"algorithm_type {plan.config.algorithm.algorithm_type} learns from rewards: set "
                "default_reward_fn_type of its taskset, or reward_fn_args.funcs"
            )
        refuse_missing(spec.needs(task))
        if spec.examine is not None:
            spec.examine(task)
        else:
            resolve_reward(task.reward_fn, task.reward_fn_args)


def make_buffer(
    plan: Plan,
    folder: JobFolder,
    text: Text,
    *,
    config: ExperienceBufferConfig | None = None,
    schema: str = "sft",
    end_ids: Collection[int] = (),
) -> Buffer:
    """Make the store between explorer and trainer, or open the data set that the trainer reads.

    With `config`: a data set that is mixed into the trainer's batches, repeated as needed. `schema`
    names the format of the rows, and `end_ids` are the ids that end the model's generation:
    supervised replies must end with one.
    """
    main = plan.config.buffer.trainer_input.experience_buffer
    parts = StoreParts(
        plan,
        config or main,
        folder.buffer,
        text.tokenizer,
        text.template,
        schema=schema,
        end_ids=end_ids,
        endless=config is not None,
    )
    kind = plan.store.kind if config is None else "file"
    return store_named(kind, parts.config).make(parts)


def make_operators(plan: Plan) -> list[Operator]:
    """Make the operators that process a step's experiences before training."""
    return [
        make_operator(OPERATORS, item.name, item.args, f"{OPERATORS_KEY}[{i}]")
        for i, item in enumerate(plan.config.data_processor.experience_pipeline.operators)
    ]


def make_raw_record(plan: Plan, folder: JobFolder) -> Record | None:
    """Make the copy of what workflows return, if the YAML wants one."""
    pipeline = plan.config.data_processor.experience_pipeline
    if not pipeline.save_input:
        return None
    from trireme.buffer.record import Record, record_for
    from trireme.buffer.table import resolve_url

    path = pipeline.input_save_path or "sqlite:///explorer_output.db"
    if path.endswith((".jsonl", ".json")):
        return record_for(path, folder.buffer, **copy_limits(plan))
    return Record(database=resolve_url(path, folder.buffer), **copy_limits(plan))


FAILED_BYTES = 20e6
"""Size limit, in bytes, of the lines of failed rollouts, each of which has its traceback."""


def make_shown_record(plan: Plan, folder: JobFolder, name: str, most: float) -> Record | None:
    """Make the readable copy of evaluations, failures or a data set's rows, if the YAML wants
    copies.

    Lines have no tokens: those of evaluations are in a database in the same folder.
    """
    if not plan.config.data_processor.experience_pipeline.save_input:
        return None
    limits = copy_limits(plan)
    from trireme.buffer.record import Record

    lines = folder.buffer / name
    limits |= {"limit": min(limits["limit"], most)}
    if name == EVALUATED:
        database = f"sqlite:///{lines.with_suffix('.db')}"
        return Record(database=database, lines=lines, messages=True, **limits)
    return Record(lines=lines, **limits)


def make_trained_tokens(plan: Plan, folder: JobFolder) -> TrainedTokens | None:
    """Make the copy of what train steps compute per token, if the YAML wants copies."""
    if not plan.config.data_processor.experience_pipeline.save_input:
        return None
    return TrainedTokens(folder.buffer, copy_limits(plan)["limit"])

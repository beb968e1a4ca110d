"""Data: makes a plan's tokenizer, tasksets and buffers.

The tokenizer and how conversations become tokens; the tasksets, to learn from and to measure with;
the buffers, and what is done to experiences on their way there. The Plan has decided; nothing is
decided here.
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
from trireme.config.schema_rollout import ExperienceBufferConfig, TasksetConfig
from trireme.config.stages import UsedTaskset, used_tasksets
from trireme.config.store import store_named
from trireme.data.rows import DataSet, NoRows, Rows, load_rows
from trireme.data.tasksets import Mixture, Taskset, check_task
from trireme.engines.api import byte_tokenizer
from trireme.envs.env import refuse_missing
from trireme.files import read_text
from trireme.model.chat_tokens import ChatTokens
from trireme.pipeline.operators import Operator, make_operator
from trireme.pipeline.pipeline import prepared, task_operators
from trireme.registry import OPERATORS, SOURCES
from trireme.rewards.reward import resolve as resolve_reward
from trireme.workflows.workflow import resolve

if TYPE_CHECKING:
    from trireme.buffer.record import Record

OPERATORS_KEY = "data_processor.experience_pipeline.operators"


@dataclass(frozen=True)
class Text:
    """The tokenizer, and how conversations become tokens."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatTokens
    template: str | None
    """The chat template that the YAML gives; None: the model's own."""


def make_text(plan: Plan, model_path: str) -> Text:
    """Tokenizer and chat template of the model, or the template that the YAML gives; for an API,
    which gets messages, a stand-in.
    """
    model = plan.config.model
    if plan.api is not None:
        return Text(tokenizer := byte_tokenizer(), ChatTokens(tokenizer), None)
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
    """The chat template that the YAML gives, as text or as a file; None: the model's own."""
    model = plan.config.model
    if model.custom_chat_template is None and model.chat_template_path:
        return read_text(Path(model.chat_template_path))
    return model.custom_chat_template


def end_ids_of(model_path: str, text: Text) -> Collection[int]:
    """Where the model's generation stops: what supervised replies have to end with."""
    from trireme.engines.torch.shell import end_tokens_of  # 1 s that `check` does without

    return end_tokens_of(model_path, text.tokenizer)


def make_training_taskset(plan: Plan) -> Taskset | Mixture | None:
    """The tasks to explore; None in the modes that only measure or only train."""
    used = [item for item in used_tasksets(plan.config) if not item.is_eval]
    mixed = len(used) > 1
    made = [
        make_taskset(plan.config, item, _prepared(plan, rows_of(item.config), item.name), mixed)
        for item in used
    ]
    return together(plan.config, made) if made else None


def make_eval_tasksets(plan: Plan) -> list[Taskset]:
    """All evaluation tasksets of the plan."""
    used = [item for item in used_tasksets(plan.config) if item.is_eval]
    return [make_taskset(plan.config, item, rows_of(item.config)) for item in used]


def together(config: Config, tasksets: Sequence[Taskset]) -> Taskset | Mixture:
    """The only taskset, or a mixture of several."""
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
    """One taskset of these rows; of one that is `mixed`, the mixture makes the batches."""
    buffer, dataset, is_eval = config.buffer, used.config, used.is_eval
    selector = dataset.task_selector or dataset.data_selector
    return Taskset(
        rows,
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
        # an evaluation tries every row, in the rows' own order
        selector="sequential" if is_eval else selector.selector_type,
        seed=selector.seed,
        feature_keys=() if is_eval else selector.feature_keys,
        selector_args={} if is_eval else selector.kwargs,
        is_eval=is_eval,
        taskset_id=used.number,
        reads_prompt=not _is_known(used.workflow) or resolve(used.workflow).reads_prompt,
    )


def _is_known(workflow: Any) -> bool:
    """Whether there is such a workflow; that there is none is said elsewhere."""
    try:
        return workflow is not None and resolve(workflow) is not None
    except (ValueError, ImportError):
        return False


def rows_of(config: TasksetConfig) -> Rows:
    """Rows of a taskset's data set; with `on_error` skip those that can be tasks."""
    data = data_set(config)
    if config.storage_type == "sql" and not SOURCES.get("sql")().takes(data):
        raise NoRows(config.path, "is no database: expected sqlite:///<file> or postgresql://...")
    rows = load_rows(
        data.path, data.subset, data.split, on_error=data.on_error, otherwise=data.otherwise
    )
    if config.on_error == "fail":
        return rows  # the taskset looks at a whole column at once
    prompt = config.format.prompt_key
    selector = config.task_selector or config.data_selector
    return rows.checked(lambda row: check_task(row, prompt, selector.feature_keys), "skip")


def data_set(config: TasksetConfig | ExperienceBufferConfig) -> DataSet:
    """The data set that a section names; a taskset's name may be that of a database's table."""
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
    """Raise ValueError where a workflow or reward of the tasks has other options, or cannot work.

    `greedy_run`: one of a task's rollouts samples otherwise than the rest. `rewards_teach`: the
    algorithm needs a reward of each rollout.
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
        if rewards_teach and unjudged is not None and not plan.engine_urls and unjudged(task):
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
    """The store between explorer and trainer, or the data set that is read.

    With `config` one of the data sets that are mixed into the trainer's batches, again and again.
    `schema` is what a data set's rows are, and `end_ids` are where the model's generation stops:
    what supervised replies have to end with.
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
    kind = plan.buffer_type if config is None else "file"
    return store_named(kind, parts.config).make(parts)


def make_operators(plan: Plan) -> list[Operator]:
    """What is done to a step's experiences before they are trained."""
    return [
        make_operator(OPERATORS, item.name, item.args, f"{OPERATORS_KEY}[{i}]")
        for i, item in enumerate(plan.config.data_processor.experience_pipeline.operators)
    ]


def make_raw_record(plan: Plan, folder: JobFolder) -> Record | None:
    """The copy of what workflows return, where the YAML wants one."""
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
"""What lines of failed rollouts may take; each has its traceback."""


def make_shown_record(plan: Plan, folder: JobFolder, name: str, most: float) -> Record | None:
    """Evaluations, failures or a data set's rows, for people, where the YAML wants copies.

    Lines have no tokens: those of evaluations are in a database beside them.
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
    """What train steps make of their tokens, where the YAML wants copies."""
    if not plan.config.data_processor.experience_pipeline.save_input:
        return None
    return TrainedTokens(folder.buffer, copy_limits(plan)["limit"])

"""Parts: makes what a plan names, one function a part. The Plan has decided; nothing here does."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.buffer.buffer import Buffer
from trireme.buffer.claims import Reuse
from trireme.buffer.file import FileBuffer
from trireme.buffer.queue import QueueBuffer
from trireme.buffer.record import Record, record_for
from trireme.buffer.replay import PRIORITIES, ReplayBuffer
from trireme.buffer.sql import SqlBuffer
from trireme.buffer.table import resolve_url
from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.config.generated import COLUMNS, generated
from trireme.config.schema import ExperienceBufferConfig, ReplayBufferConfig, TasksetConfig
from trireme.data.kinds import FORMATS
from trireme.data.mixture import Mixture
from trireme.data.rows import Rows, load_rows
from trireme.data.tasksets import Taskset, check_task
from trireme.engines.device import Device
from trireme.engines.engine import Engine, Sampling
from trireme.engines.gate import Gate
from trireme.engines.remote import RemoteEngine
from trireme.engines.torch.engine import TorchEngine
from trireme.explorer.runner import Key, Runner, TimeLimit, batch_order
from trireme.explorer.scheduler import OverRollout, Scheduler
from trireme.launch.auxiliary import Auxiliary, Served
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.pipeline.names import OPERATORS
from trireme.pipeline.operator import make_operator
from trireme.pipeline.pipeline import Pipeline
from trireme.pipeline.tasks import prepared
from trireme.rewards.reward import resolve as resolve_reward
from trireme.server.engine_spec import MAX_ROWS
from trireme.task import Task
from trireme.trainer.backend import TorchBackend
from trireme.trainer.critic import Critic
from trireme.trainer.fsdp2 import Fsdp2Backend
from trireme.trainer.lora import Lora
from trireme.trainer.orders import Orders
from trireme.trainer.ranks import Ranks
from trireme.workflows.workflow import resolve


@dataclass(frozen=True)
class Text:
    """The tokenizer, and how conversations become tokens."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatTokens
    template: str | None
    """The chat template that the YAML gives; None: the model's own."""


def make_text(plan: Plan, model_path: str) -> Text:
    """Tokenizer and chat template of the model, or the template that the YAML gives."""
    model = plan.config.model
    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=model.trust_remote_code)
    template = model.custom_chat_template
    if template is None and model.chat_template_path:
        template = Path(model.chat_template_path).read_text()
    chat = ChatTokens(tokenizer, chat_template=template, enable_thinking=model.enable_thinking)
    return Text(tokenizer, chat, template)


def make_backend(plan: Plan, model_path: str, recipe: Recipe) -> TorchBackend:
    """The trained model with its optimizer, and the reference where the recipe needs one."""
    return TorchBackend(model_path, device=plan.device, **_backend_options(plan, recipe))


def make_sharded_backend(
    plan: Plan, model_path: str, recipe: Recipe, ranks: Ranks, orders: Orders | None = None
) -> Fsdp2Backend:
    """The same over several ranks; `orders` on the first one."""
    return Fsdp2Backend(
        model_path,
        ranks=ranks,
        orders=orders,
        offload=plan.config.trainer.offload,
        **_backend_options(plan, recipe),
    )


def _backend_options(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """What every backend takes."""
    config = plan.config
    loras = config.model.lora_configs or []
    lora = None
    if loras:
        targets = loras[0].target_modules
        lora = Lora(
            rank=loras[0].lora_rank,
            alpha=loras[0].lora_alpha,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
        )
    return {
        "optimizer": config.algorithm.optimizer,
        "max_token_len": plan.max_token_len,
        "total_steps": plan.schedule_steps,
        "dtype": plan.dtype,
        "grad_clip": config.trainer.grad_clip,
        "lora": lora,
        "gradient_checkpointing": config.trainer.enable_gradient_checkpointing,
        "reference": recipe.needs_reference,
        "trust_remote_code": config.model.trust_remote_code,
    }


def make_critic(plan: Plan, model_path: str, recipe: Recipe) -> Critic | None:
    """The value model, where the recipe has one: from its own path, else from the policy's."""
    config = plan.config
    if not recipe.needs_critic:
        return None
    return Critic(
        config.model.critic_model_path or model_path,
        optimizer=config.algorithm.critic.optimizer,
        max_token_len=plan.max_token_len,
        total_steps=plan.schedule_steps,
        device=plan.device,
        dtype=plan.dtype,
        grad_clip=config.trainer.grad_clip,
        clip_range=config.algorithm.critic.cliprange_value,
        trust_remote_code=config.model.trust_remote_code,
    )


def make_engine(
    plan: Plan, model_path: str, text: Text, device: Device, gate: Gate | None, share: Any = None
) -> TorchEngine:
    """The embedded engine; `share` is the trainer's module whose tensors it reads."""
    own_seed = plan.config.explorer.rollout_model.seed
    return TorchEngine(
        model_path,
        tokenizer=text.tokenizer,
        device=device,
        seed=plan.seed if own_seed is None else own_seed,
        max_model_len=plan.max_model_len,
        max_rows=MAX_ROWS,
        gate=gate,
        dtype=plan.dtype,
        share_with=share,
        trust_remote_code=plan.config.model.trust_remote_code,
    )


def make_remote_engine(plan: Plan, urls: Sequence[str], key: str | None) -> RemoteEngine:
    """The rollout servers at these addresses."""
    timeout = plan.config.explorer.max_timeout
    return RemoteEngine(urls, api_key=key, timeout=timeout, seed=plan.seed)


def make_scheduler(
    plan: Plan,
    model_path: str,
    engine: Engine,
    text: Text,
    gate: Gate | None,
    *,
    greedy_run: bool = False,
    auxiliary: Sequence[Auxiliary | Served] = (),
) -> Scheduler:
    """As many runners as the plan says, each of which makes a Model for every attempt.

    With `greedy_run` run 0 of every training task is greedy. `auxiliary` are models that workflows
    may ask.
    """

    def make_further(task: Task) -> list[Any]:
        key = (batch_order(task), task.task_id, -1)
        return [other.model(key) for other in auxiliary]

    def make_model(task: Task, key: Key) -> Model:
        sampling = sampling_of(plan, task.rollout_args)
        if greedy_run and key[2] == 0 and not task.is_eval:
            sampling = dataclasses.replace(sampling, temperature=0.0)
        return Model(
            engine,
            text.chat,
            key=key,
            sampling=sampling,
            max_model_len=plan.max_model_len,
            max_prompt_tokens=plan.max_prompt_tokens,
            enable_prompt_truncation=plan.config.model.enable_prompt_truncation,
            model_path=model_path,
            auxiliary=[other.model(key) for other in auxiliary],
        )

    explorer = plan.config.explorer
    dynamic = explorer.dynamic_timeout
    limit = TimeLimit(
        explorer.max_timeout,
        ratio=dynamic.ratio if dynamic.enable else None,
        warmup=plan.batch_size * max(dynamic.warmup_min_steps, 1),
    )
    runners = [
        Runner(
            make_model,
            engine,
            limit=limit,
            max_retries=explorer.max_retry_times,
            concurrent_mode=explorer.concurrent_mode,
            gate=gate,
            index=index,
        )
        for index in range(plan.runners)
    ]
    over = explorer.over_rollout
    return Scheduler(
        runners,
        max_repeats_per_runner=explorer.max_repeat_times_per_runner,
        over_rollout=OverRollout(over.ratio, over.wait_after_min, over.return_partial_tasks)
        if over.ratio
        else None,
        report_interval=explorer.runner_state_report_interval,
        further=make_further if auxiliary else None,
    )


def sampling_of(plan: Plan, args: Mapping[str, Any]) -> Sampling:
    """How a task samples: its `rollout_args`, else the model section's defaults."""
    model = plan.config.model

    def given(name: str, default: Any) -> Any:
        value = args.get(name)
        return default if value is None else value

    return Sampling(
        max_tokens=given("max_tokens", plan.max_response_tokens),
        min_tokens=given("min_tokens", plan.min_response_tokens),
        temperature=given("temperature", model.temperature),
        top_p=given("top_p", model.top_p),
        top_k=given("top_k", model.top_k),
        min_p=given("min_p", 0.0),
        repetition_penalty=given("repetition_penalty", model.repetition_penalty),
        stop=tuple(given("stop", ())),
        stop_token_ids=tuple(given("stop_token_ids", ())),
        ignore_eos=plan.config.explorer.rollout_model.ignore_eos,
        logprobs=given("logprobs", model.logprobs),
    )


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


def make_buffer(
    plan: Plan,
    folder: JobFolder,
    text: Text,
    *,
    schema: str = "sft",
    end_ids: Collection[int] = (),
) -> tuple[Buffer, Record | None]:
    """The store between explorer and trainer or the data set that is read, and a queue's copy.

    `schema` is what a data set's rows are, and `end_ids` are where the model's generation stops:
    what supervised replies have to end with.
    """
    config = plan.config.buffer.trainer_input.experience_buffer
    if plan.buffer_type == "file":
        return make_file_buffer(plan, config, text, end_ids, schema=schema), None
    if plan.buffer_type == "sql":
        roles: dict[str, Any] = {"explore": "explore", "serve": "explore", "train": "train"}
        role = roles.get(plan.mode, "both")
        names = {"explore": plan.config.explorer.name, "train": plan.config.trainer.name}
        store = SqlBuffer(
            config.name,
            resolve_url(plan.buffer_path, folder.buffer),
            role=role,
            party=names.get(role),
            capacity=config.capacity,
            max_read_timeout=config.max_read_timeout,
            lease_time=config.lease_time,
            reuse=_reuse(config.replay_buffer),
            retries=config.max_retry_times,
            retry_seconds=config.max_retry_interval,
        )
        return store, None
    record = record_for(config.path, folder.buffer)
    replay = config.replay_buffer
    if replay.enable:
        priority = PRIORITIES[replay.priority_fn](**replay.priority_fn_args)
        buffer = ReplayBuffer(
            config.name,
            priority=priority,
            reuse_cooldown_time=replay.reuse_cooldown_time,
            capacity=config.capacity,
            max_read_timeout=config.max_read_timeout,
            record=record,
        )
        return buffer, record
    queue = QueueBuffer(
        config.name,
        capacity=config.capacity,
        max_read_timeout=config.max_read_timeout,
        record=record,
    )
    return queue, record


def _reuse(replay: ReplayBufferConfig) -> Reuse | None:
    """Priority replay in a database."""
    if not replay.enable:
        return None
    limit = 3 if replay.priority_fn == "decay_limit_randomization" else 0
    args = {"use_count_limit": limit, **replay.priority_fn_args}
    return Reuse(cooldown=replay.reuse_cooldown_time, **args)


def make_file_buffer(
    plan: Plan,
    config: ExperienceBufferConfig,
    text: Text,
    end_ids: Collection[int],
    *,
    schema: str = "sft",
    endless: bool = False,
) -> FileBuffer:
    """A data set as a store; `endless`: again and again, for who mixes it into something else."""
    model = plan.config.model
    rows = load_rows(
        config.path or "",
        config.subset_name,
        config.split,
        progress=config.enable_progress_bar,
        on_error=config.on_error,
    )
    form = FORMATS[schema](
        rows,
        text.tokenizer,
        max_model_len=plan.max_model_len,
        format_args=dataclasses.asdict(config.format),
        end_ids=end_ids,
        chat_template=text.template,
        enable_thinking=model.enable_thinking,
        on_error=config.on_error,
    )
    epochs = None if plan.train_steps or endless else plan.config.buffer.total_epochs
    return FileBuffer(config.name, form, total_epochs=epochs, seed=plan.seed)


def make_pipeline(plan: Plan, recipe: Recipe, raw: Record | None) -> Pipeline:
    """What is done to a step's experiences before they are trained."""
    key = "data_processor.experience_pipeline.operators"
    operators = [
        make_operator(OPERATORS, item.name, item.args, f"{key}[{place}]")
        for place, item in enumerate(plan.config.data_processor.experience_pipeline.operators)
    ]
    return Pipeline(recipe, raw=raw, operators=operators)


def make_raw_record(plan: Plan, folder: JobFolder) -> Record | None:
    """The copy of what workflows return, where the YAML wants one."""
    pipeline = plan.config.data_processor.experience_pipeline
    if not pipeline.save_input:
        return None
    path = pipeline.input_save_path or "sqlite:///explorer_output.db"
    if path.endswith((".jsonl", ".json")):
        return record_for(path, folder.buffer)
    return Record(database=resolve_url(path, folder.buffer))


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
            examine = spec.examine
            if examine is not None:
                examine(task)
            else:
                resolve_reward(task.reward_fn, task.reward_fn_args)


def make_recipe(plan: Plan) -> Recipe:
    """The algorithm of the plan."""
    return get_recipe(plan.config.algorithm)

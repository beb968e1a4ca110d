"""Stores: where the experiences of a plan wait, and what is done to them on the way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

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
from trireme.config.schema import ExperienceBufferConfig, ReplayBufferConfig
from trireme.data.kinds import FORMATS
from trireme.data.rows import load_rows
from trireme.launch.parts.text import Text
from trireme.pipeline.names import OPERATORS
from trireme.pipeline.operator import Operator, make_operator


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
    record = record_for(config.path, folder.buffer, **_copy_limits(plan))
    replay = config.replay_buffer
    if replay.enable:
        seed = {"seed": plan.seed} if replay.priority_fn == "decay_limit_randomization" else {}
        priority = PRIORITIES[replay.priority_fn](**replay.priority_fn_args, **seed)
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


def make_operators(plan: Plan) -> list[Operator]:
    """What is done to a step's experiences before they are trained."""
    key = "data_processor.experience_pipeline.operators"
    return [
        make_operator(OPERATORS, item.name, item.args, f"{key}[{place}]")
        for place, item in enumerate(plan.config.data_processor.experience_pipeline.operators)
    ]


def make_raw_record(plan: Plan, folder: JobFolder) -> Record | None:
    """The copy of what workflows return, where the YAML wants one."""
    pipeline = plan.config.data_processor.experience_pipeline
    if not pipeline.save_input:
        return None
    path = pipeline.input_save_path or "sqlite:///explorer_output.db"
    if path.endswith((".jsonl", ".json")):
        return record_for(path, folder.buffer, **_copy_limits(plan))
    return Record(database=resolve_url(path, folder.buffer), **_copy_limits(plan))


def _copy_limits(plan: Plan) -> dict[str, Any]:
    """How much of a copy stays."""
    pipeline = plan.config.data_processor.experience_pipeline
    limit = pipeline.copy_limit_mb * 1e6 or math.inf
    return {"limit": limit, "sampled": pipeline.copy_policy == "sampled"}

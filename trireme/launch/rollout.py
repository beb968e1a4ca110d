"""Rollout: makes the scheduler and runners of a plan, with the sampling options of its tasks."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from transformers.utils.logging import disable_progress_bar

from trireme.config import Plan
from trireme.engines.api import ApiEngine
from trireme.engines.device import Device, RolloutBarrier
from trireme.engines.engine import Engine, Sampling, with_options
from trireme.engines.make import make_torch_engine
from trireme.explorer.runner import Key, Runner, TimeLimit, batch_order
from trireme.explorer.scheduler import OverRollout, Scheduler
from trireme.launch.api_model import ApiModel, with_calls_read
from trireme.launch.data import Text, make_text
from trireme.launch.engines import Auxiliary, Endpoint, engine_spec, make_auxiliary
from trireme.model.model import Model
from trireme.server.gateway import Gateway
from trireme.server.rollouts import Rollouts
from trireme.task import Task

UNLIMITED = 2**31
"""Tokens, where an API has limits of its own."""


def make_scheduler(
    plan: Plan,
    model_path: str,
    engine: Engine,
    text: Text,
    barrier: RolloutBarrier | None,
    *,
    greedy_run: bool = False,
    teacher: bool = False,
    auxiliary: Sequence[Auxiliary | Endpoint] = (),
    max_retries: int | None = None,
) -> Scheduler:
    """As many runners as the plan says, each of which makes a Model for every attempt.

    With `greedy_run` run 0 of every training task is greedy. `auxiliary` are models that workflows
    may ask; with `teacher` the first of them scores what is sampled. `max_retries` goes before the
    plan's.
    """
    if plan.api is not None:  # which has its own limits, in tokens of its own
        plan = dataclasses.replace(plan, max_model_len=UNLIMITED, max_prompt_tokens=UNLIMITED - 1)
    model_type = Model
    if isinstance(engine, ApiEngine):
        model_type, text.chat.tool_format = ApiModel, with_calls_read(text.chat.tool_format)
    remembered = [({}, sampling_of(plan, {}))]
    gateway = Gateway(Rollouts(engine, text.chat, model_path, plan.max_model_len))

    def make_further(task: Task) -> list[Any]:
        key = (batch_order(task), task.task_id, -1)
        return [other.model(key) for other in auxiliary]

    def make_model(task: Task, key: Key) -> Model:
        # checked anew only where the options are others: that takes as long as the rest of this
        if remembered[0][0] != task.rollout_args:
            args = copy.deepcopy(dict(task.rollout_args))
            remembered[0] = args, sampling_of(plan, args)
        sampling = remembered[0][1]
        if greedy_run and key[2] == 0 and not task.is_eval:
            sampling = dataclasses.replace(sampling, temperature=0.0)
        return model_type(
            engine,
            text.chat,
            key=key,
            sampling=sampling,
            max_model_len=plan.max_model_len,
            max_prompt_tokens=plan.max_prompt_tokens,
            enable_prompt_truncation=plan.config.model.enable_prompt_truncation,
            model_path=model_path,
            auxiliary=[other.model(key) for other in auxiliary],
            gateway=gateway.address,
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
            max_retries=explorer.max_retry_times if max_retries is None else max_retries,
            concurrent_mode=explorer.concurrent_mode,
            barrier=barrier,
            index=index,
            explorer=plan.explorer_name,
            teacher=teacher,
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
        close_last=gateway.close,
    )


@asynccontextmanager
async def open_scheduler(
    plan: Plan, make_engine: Callable[[Text], Engine] | None = None, **options: Any
) -> AsyncIterator[tuple[Scheduler, Text]]:
    """A scheduler that tries tasks outside a run, over the plan's embedded engine or the one that
    `make_engine` gives, with the models beside it; all is closed. `options`: make_scheduler's.
    """
    disable_progress_bar()
    os.environ.update(plan.config.explorer.env_vars)
    text = make_text(plan, plan.model_path)
    async with AsyncExitStack() as held:
        device = Device()
        held.callback(device.close)
        if make_engine is not None:
            engine = make_engine(text)
        else:
            engine = make_torch_engine(engine_spec(plan, plan.model_path), text.tokenizer, device)
        held.push_async_callback(engine.close)
        others = make_auxiliary(plan, device)
        for other in others:
            if isinstance(other, Auxiliary):
                held.push_async_callback(other.engine.close)
        path = plan.model_path
        scheduler = make_scheduler(plan, path, engine, text, None, auxiliary=others, **options)
        held.push_async_callback(scheduler.close)
        scheduler.start()
        yield scheduler, text


def sampling_of(plan: Plan, args: Mapping[str, Any]) -> Sampling:
    """How a task samples: its `rollout_args`, else the model section's defaults."""
    model = plan.config.model

    def given(name: str, default: Any) -> Any:
        value = args.get(name)
        return default if value is None else value

    options = {
        "max_tokens": given("max_tokens", plan.max_response_tokens),
        "min_tokens": given("min_tokens", plan.min_response_tokens),
        "temperature": given("temperature", model.temperature),
        "top_p": given("top_p", model.top_p),
        "top_k": given("top_k", model.top_k),
        "min_p": given("min_p", 0.0),
        "repetition_penalty": given("repetition_penalty", model.repetition_penalty),
        "stop": given("stop", ()),
        "stop_token_ids": given("stop_token_ids", ()),
        "ignore_eos": plan.config.explorer.rollout_model.ignore_eos,
        "logprobs": given("logprobs", model.logprobs),
    }
    return with_options(Sampling(), options)

"""Evaluation: tries the evaluation tasksets of a plan with one model, and keeps every value."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from trireme.config import Plan
from trireme.engines.api import ASKED, ApiEngine, Asked
from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.engines.make import make_torch_engine
from trireme.explorer.metrics import runs_of
from trireme.explorer.runner import Outcome
from trireme.launch.data import make_eval_tasksets, make_text
from trireme.launch.engine_host import engine_hosts, start_all, stop_all
from trireme.launch.engines import Auxiliary, engine_spec, make_auxiliary, make_remote_engine
from trireme.launch.rollout import make_scheduler
from trireme.model.model import Model, Reply

MEASURES = ("accuracy", "reward")
"""What a rollout is worth: the first of these that rollouts have."""


@dataclass
class Evaluated:
    """What one model did on one taskset."""

    taskset: str
    measure: str
    values: list[list[float]] = field(default_factory=list)
    """Of each task, one a rollout; a rollout that failed has 0."""
    failures: Counter[str] = field(default_factory=Counter)
    """Why, and how often."""


@dataclass(frozen=True)
class Api:
    """A model behind someone else's OpenAI API."""

    name: str
    base_url: str
    key: str | None = None


class ApiModel(Model):
    """A Model whose conversations reach an API as they are."""

    async def chat_samples(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None, **options: Any
    ) -> list[Reply]:
        """See Model."""
        asked = ASKED.set(Asked(messages, tools))
        try:
            return await super().chat_samples(messages, tools, **options)
        finally:
            ASKED.reset(asked)


def evaluate(plan: Plan, *, rollouts: int | None = None, api: Api | None = None) -> list[Evaluated]:
    """Try every task of the plan's evaluation tasksets `rollouts` times (their own number), with
    the plan's model, or the `api`'s.

    Raises ValueError where there is no such taskset, RuntimeError where the engine or the API
    fails, or more rollouts do than `explorer.max_failures` allows.
    """
    return asyncio.run(_evaluate(plan, rollouts, api))


async def _evaluate(plan: Plan, rollouts: int | None, api: Api | None) -> list[Evaluated]:
    tasksets = make_eval_tasksets(plan)
    if not tasksets:
        raise ValueError("buffer.explorer_input.eval_tasksets is empty: there is nothing to try")
    disable_progress_bar()
    os.environ.update(plan.config.explorer.env_vars)
    text = make_text(plan, plan.model_path)
    async with AsyncExitStack() as held:
        device = Device()
        held.callback(device.close)
        hosts = [] if api else engine_hosts(plan, plan.model_path, Path(plan.job_dir) / "log")
        held.push_async_callback(stop_all, hosts)
        await start_all(hosts)
        engine: Engine
        if api is not None:
            engine = ApiEngine(
                api.base_url,
                api.name,
                tokenizer=text.tokenizer,
                max_model_len=plan.max_model_len,
                api_key=api.key,
                timeout=plan.config.explorer.max_timeout,
            )
        elif urls := tuple(host.url for host in hosts) or plan.engine_urls:
            key = hosts[0].key if hosts else plan.engine_key
            engine = make_remote_engine(plan, urls, key)
        else:
            engine = make_torch_engine(engine_spec(plan, plan.model_path), text.tokenizer, device)
        held.push_async_callback(engine.close)
        others = make_auxiliary(plan, device)
        for other in others:
            if isinstance(other, Auxiliary):
                held.push_async_callback(other.engine.close)
        kind = Model if api is None else ApiModel
        path = plan.model_path
        scheduler = make_scheduler(
            plan, path, engine, text, None, auxiliary=others, model_type=kind
        )
        held.push_async_callback(scheduler.close)
        scheduler.start()
        names = [f"0/{taskset.name}" for taskset in tasksets]
        for name, taskset in zip(names, tasksets, strict=True):
            tasks = taskset.all()
            if rollouts is not None:
                tasks = [dataclasses.replace(task, repeat_times=rollouts) for task in tasks]
            await scheduler.submit(name, tasks)
        return [
            _evaluated(
                taskset.name, await scheduler.results(name), plan.config.explorer.max_failures
            )
            for name, taskset in zip(names, tasksets, strict=True)
        ]


def _evaluated(name: str, outcomes: list[Outcome], limit: float) -> Evaluated:
    """The values of a taskset's rollouts. Raises RuntimeError where every one has failed, or more
    than the share `limit`.
    """
    rows = [runs_of(outcome.rollouts) for outcome in outcomes]
    failures = Counter(str(one.fault) for outcome in outcomes for one in outcome.failures)
    known = {key for runs in rows for run in runs for key in run}
    if not known:
        raise RuntimeError(f"{name}: every rollout failed: {failures.most_common(1)[0][0]}")
    wanted = sum(outcome.task.repeat_times for outcome in outcomes)
    if failures.total() > limit * wanted:
        worst = failures.most_common(1)[0][0]
        raise RuntimeError(
            f"{name}: {failures.total()} of {wanted} rollouts failed "
            f"(explorer.max_failures is {limit:g}): {worst}"
        )
    measure = next((key for key in MEASURES if key in known), None)
    if measure is None:
        raise RuntimeError(f"{name}: the workflow gives neither accuracy nor reward")
    values = []
    for outcome, runs in zip(outcomes, rows, strict=True):
        own = [run[measure] for run in runs if measure in run]
        values.append(own + [0.0] * (outcome.task.repeat_times - len(own)))
    return Evaluated(name, measure, values, failures)

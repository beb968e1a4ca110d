"""Evaluation: tries the evaluation tasksets of a plan with one model, and keeps every value."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.config.api import Api
from trireme.data.tasksets import Taskset
from trireme.engines.engine import Engine
from trireme.explorer.metrics import Evaluated, try_tasksets
from trireme.launch.data import Text, make_eval_tasksets
from trireme.launch.engine_host import engine_hosts, kept, remote_engine, start_all, stop_all
from trireme.launch.engines import make_api_engine
from trireme.launch.rollout import open_scheduler


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
    if api is None and plan.launcher == "ray":
        from trireme.launch.ray.run import evaluate_on_ray

        return await evaluate_on_ray(plan, rollouts)
    hosts = [] if api else engine_hosts(plan, plan.model_path, JobFolder(plan.job_dir).log)
    try:
        await start_all(hosts)
        engine = None if api else remote_engine(plan, hosts)
        work = _try_here(plan, tasksets, rollouts, engine, api)
        return await (kept(work, plan, hosts, engine) if hosts and engine else work)
    finally:
        await stop_all(hosts)


async def _try_here(
    plan: Plan,
    tasksets: Sequence[Taskset],
    rollouts: int | None,
    remote: Engine | None,
    api: Api | None,
) -> list[Evaluated]:
    """From this process: the `remote` engine answers, the `api`, or one that is embedded."""

    def make_engine(text: Text) -> Engine:
        if api is None:
            assert remote is not None
            return remote
        return make_api_engine(plan, api, text)

    embedded = remote is None and api is None
    async with open_scheduler(plan, None if embedded else make_engine) as (scheduler, _):
        limit = plan.config.explorer.max_failures
        return await try_tasksets(scheduler, tasksets, rollouts, limit)

"""Local: runs one plan in this process: explorer, trainer and engine on one event loop.

`run_both` is the whole main: two coroutines, `explore` and `train`, that meet in the buffer and at
the synchronizer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from trireme.buffer.buffer import OtherSideFailed
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import prove
from trireme.config import Plan
from trireme.engines.device import Device, Turns
from trireme.engines.engine import Engine
from trireme.engines.remote import RemoteEngine
from trireme.launch.engine_host import EngineHost, EngineKeeper, engine_hosts, start_all, stop_all
from trireme.launch.session import Session
from trireme.launch.stage_result import StageResult
from trireme.launch.stop import Stop
from trireme.monitor.console import Console
from trireme.sync.checkpoint import PolledSync
from trireme.sync.synchronizer import Synchronizer
from trireme.trainer.trainer import Stopped, Trainer

T = TypeVar("T")


async def run_plan(
    plan: Plan, model_path: str, console: Console, *, stop: Stop, measure_end: bool = True
) -> StageResult:
    """Run one stage to its end. Raises the first cause where it fails, Stopped where `stop` asks.

    `measure_end`: a supervised stage evaluates its model at the end; not where the next stage
    begins with the same evaluation.
    """
    stop.plan, stop.limit = plan, plan.config.cluster.stop_timeout
    if plan.launcher == "ray":
        from trireme.launch.ray.run import run_on_ray

        return await run_on_ray(plan, model_path, console, stop=stop, measure_end=measure_end)
    started = time.monotonic()
    modes = {"both": run_both, "train": run_train, "explore": run_explore, "bench": run_bench}
    if plan.mode == "serve":
        from trireme.launch.serving import run_serve  # a web server, which no other mode needs

        modes["serve"] = run_serve
    device = Device()
    folder = JobFolder(plan.job_dir, plan.explorer_name)
    hosts = engine_hosts(plan, model_path, folder.log)
    try:
        with Session(plan, model_path, console, device, measure_end, hosts=hosts) as session:
            stop.gently, stop.waits_for = session.stop, session.doing
            await start_all(hosts)
            if plan.takes_turns and isinstance(engine := session.engine, RemoteEngine):
                device.turns = engine.turns = Turns(engine)
            result = await kept(session, hosts, modes[plan.mode](session))
            result.warnings = session.alarm.end()
    finally:
        await stop_all(hosts)
        device.close()
    result.seconds = time.monotonic() - started
    if session.resumed is not None and result.steps == session.resumed.step:
        console.note(nothing_left(plan, result.steps))
    return result


def nothing_left(plan: Plan, steps: int) -> str:
    """What a start did that found its run at its end, and what makes it go on."""
    config = plan.config
    keys = {
        "trainer.total_steps": config.trainer.total_steps,
        "buffer.total_steps": config.buffer.total_steps,
    }
    ends = [f"{key} ({value})" for key, value in keys.items() if value]
    more = " and ".join(ends) or f"buffer.total_epochs ({config.buffer.total_epochs})"
    return f"nothing was left to do: step {steps} was this run's last. To train on, raise {more}"


async def kept(session: Session, hosts: Sequence[EngineHost], work: Awaitable[T]) -> T:
    """The result of `work`, while engines that die are started again where weights come by sync."""
    if not hosts:
        return await work
    engine, restarts = session.engine, session.plan.config.cluster.engine_restarts
    assert isinstance(engine, RemoteEngine)
    if session.plan.mode == "bench":
        restarts = 0
    return await EngineKeeper(hosts, engine.servers, restarts=restarts).run(work)


def restarts_by(sync: Synchronizer | PolledSync, engine: Engine) -> None:
    """Engines that are started again get their weights by `sync`."""
    if isinstance(engine, RemoteEngine):
        sync.persist = engine.servers.persist
        engine.servers.renew = sync.renew


async def run_both(session: Session) -> StageResult:
    """Explorer and trainer, each in its coroutine."""
    sync = session.synchronizer
    explorer, trainer = session.explorer(sync), session.trainer(sync)
    restarts_by(sync, session.engine)

    async def explore() -> None:
        await explorer.explore()
        sync.explored()

    try:
        if session.resumed or session.engine_urls:
            await sync.persist(lambda: session.refresh_engine(sync.version))
        await first_failure_ends_all(explore(), trainer.train())
        await sync.final_push()
        await explorer.evaluate_last(trainer.step)
    finally:
        await explorer.close()
        await session.close_engines()
    return StageResult.of(session, explorer, trainer)


async def run_train(session: Session) -> StageResult:
    """The trainer alone: on a data set (SFT, DPO), or on what explorers of other processes put."""
    if session.recipe.from_data:
        return await run_supervised(session)
    trainer = session.trainer(session.synchronizer)
    await train_for_others(session, trainer)
    return StageResult.of(session, None, trainer)


async def train_for_others(session: Session, trainer: Trainer) -> None:
    """Train on what explorers of other processes put, and tell them how it stands."""
    session.announce("running", trainer.step)
    try:
        await trainer.train()
        await session.synchronizer.final_push()
    except Stopped:
        raise  # they wait until it is started again
    except Exception as error:
        # explorers of other processes wait for us, for room or for weights
        session.announce(f"failed: {type(error).__name__}: {error}", trainer.step)
        await session.buffer.fail(error)
        raise
    session.announce("stopped", trainer.step)


async def run_supervised(session: Session) -> StageResult:
    """The trainer on a data set, and the evaluations before the first stage and after the last."""
    trainer = session.trainer(None)
    if not session.eval_tasksets:
        await trainer.train()
        return StageResult.of(session, None, trainer)
    explorer = session.explorer(session.synchronizer)
    try:
        if session.measures_start:
            await explorer.evaluate(0)
        await trainer.train()
        if session.measure_end:
            await session.refresh_engine(trainer.step)
            await explorer.evaluate(trainer.step)
    finally:
        await explorer.close()
        await session.close_engines()
    return StageResult.of(session, explorer, trainer)


async def run_explore(session: Session) -> StageResult:
    """The explorer alone: experiences go into the SQL store, weights come from the job folder."""
    sync = session.polled_sync()
    restarts_by(sync, session.engine)
    explorer = session.explorer(sync)
    try:
        await sync.load_latest()
        await explorer.explore()
        await explorer.evaluate_last(explorer.step)
    finally:
        await explorer.close()
        await session.close_engines()
    return StageResult.of(session, explorer, None)


async def run_bench(session: Session) -> StageResult:
    """Evaluate the base model and every checkpoint of the job, or its newest one alone."""
    folder, steps = session.folder, session.folder.steps()
    only_newest = session.plan.config.explorer.bench_on_latest_checkpoint
    if only_newest and not steps:
        raise ValueError(f"mode bench: there is no checkpoint in {folder.root}")
    explorer = session.explorer(session.polled_sync(), prefix="bench")
    try:
        if not only_newest:
            await explorer.evaluate(0)
        for step in steps[-1:] if only_newest else steps:
            prove(weights := folder.weights_dir(step))
            await session.engine.update_weights(weights, step)
            await explorer.evaluate(step)
    finally:
        await explorer.close()
        await session.close_engines()
    return StageResult.of(session, explorer, None)


async def first_failure_ends_all(*work: Awaitable[Any]) -> None:
    """Wait for all; the first that raises cancels the others and is raised.

    What one says only because the other has failed gives way to the other's own error: which of
    the two ends first is chance.
    """
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            try:
                task.result()
            except OtherSideFailed as error:
                raise error.__cause__ or error from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

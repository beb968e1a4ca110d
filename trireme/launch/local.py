"""Local: runs one plan in this process: explorer, trainer and engine on one event loop."""

from __future__ import annotations

import time

from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.engines.device import ColocationLock, Device
from trireme.engines.engine import Engine
from trireme.engines.remote import RemoteEngine
from trireme.launch.engine_host import engine_hosts, kept, remote_engine, start_all, stop_all
from trireme.launch.engines import make_api_engine
from trireme.launch.modes import run_bench, run_both, run_explore, run_train
from trireme.launch.opening import open_run
from trireme.launch.sides import ExplorerSide, TrainerSide, embedded_engine
from trireme.launch.stage import Stage, StageResult
from trireme.launch.stop import Stop
from trireme.launch.training import load_models, make_polled_sync, restarts_by
from trireme.monitor.console import Console


async def run_plan(
    plan: Plan, model_path: str, console: Console, *, stop: Stop, measure_end: bool = True
) -> StageResult:
    """Run one stage to its end. Raises the first cause where it fails, Stopped where `stop` asks.

    `measure_end`: a supervised stage evaluates its model at the end; not where the next stage
    begins with the same evaluation.
    """
    stop.begin(plan)
    if plan.launcher == "ray":
        from trireme.launch.ray.run import run_on_ray

        return await run_on_ray(plan, model_path, console, stop=stop, measure_end=measure_end)
    started = time.monotonic()
    device = Device()
    hosts = engine_hosts(plan, model_path, JobFolder(plan.job_dir, plan.explorer_name).log)
    try:
        with open_run(plan, model_path, device, console) as (stage, monitored):
            await start_all(hosts)
            engine = remote_engine(plan, hosts)
            if plan.takes_turns and engine is not None:
                device.colocation = engine.colocation = ColocationLock(engine)
            work = _run_mode(stage, engine, stop, measure_end)
            if hosts and engine is not None:
                work = kept(work, plan, hosts, engine)
            result = await work
            result.warnings = monitored.warnings()
    finally:
        await stop_all(hosts)
        device.close()
    result.seconds = time.monotonic() - started
    if stage.resumed is not None and result.steps == stage.resumed.step:
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


async def _run_mode(
    stage: Stage, remote: RemoteEngine | None, stop: Stop, measure_end: bool
) -> StageResult:
    """The plan's mode, with an embedded engine where there is no `remote` one."""
    if stage.trains:
        return await _run_trainer(stage, remote, stop, measure_end)
    if stage.plan.mode == "explore":
        return await _run_explore(stage, remote or embedded_engine(stage))
    if stage.plan.mode == "bench":
        api = stage.plan.api
        asked = make_api_engine(stage.plan, api, stage.text) if api else remote
        return await _run_bench(stage, asked or embedded_engine(stage))
    from trireme.launch.serving import run_serve  # a web server, which no other mode needs

    return await run_serve(stage, remote, stop)


async def _run_trainer(
    stage: Stage, remote: RemoteEngine | None, stop: Stop, measure_end: bool
) -> StageResult:
    """Modes `both` and `train`. The engine is made after the models whose tensors it may read."""
    both = stage.plan.mode == "both"
    evaluates = stage.recipe.from_data and bool(stage.eval_tasksets)
    models = load_models(stage)
    engine = explorer = None
    if both or evaluates:
        engine = remote or embedded_engine(stage, models.backend)
    trainer = TrainerSide(stage, models, engine)
    stop.gently, stop.waits_for = trainer.trainer.stop, lambda: trainer.trainer.doing
    if engine is not None:
        explorer = ExplorerSide(stage, engine, trainer.buffer if both else None, trainer.sync)
    if engine is None or explorer is None:
        return await run_train(stage, trainer, None, measure_end=measure_end)
    try:
        if not both:
            return await run_train(stage, trainer, explorer, measure_end=measure_end)
        trainer.explorer_state = explorer.explorer.state
        # engine processes of this run have loaded the same files; a user's own servers may have
        # other weights from an earlier run or stage
        refresh = stage.resumed is not None or bool(stage.plan.engine_urls)
        return await run_both(stage, trainer, explorer, refresh=refresh)
    finally:
        await explorer.close()
        await engine.close()


async def _run_explore(stage: Stage, engine: Engine) -> StageResult:
    sync = make_polled_sync(stage.plan, engine, stage.folder)
    restarts_by(sync, engine)
    explorer = ExplorerSide(stage, engine, stage.buffer, sync)
    try:
        await sync.load_latest()
        return await run_explore(stage, explorer)
    finally:
        await explorer.close()
        await engine.close()


async def _run_bench(stage: Stage, engine: Engine) -> StageResult:
    sync = make_polled_sync(stage.plan, engine, stage.folder)
    explorer = ExplorerSide(stage, engine, None, sync, prefix="bench")
    try:
        result = await run_bench(stage, explorer)
        engine.health()  # an API that failed has measured nothing
        return result
    finally:
        await explorer.close()
        await engine.close()

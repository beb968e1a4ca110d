"""Run: runs the plans of a YAML one after the other, each on the model of the one before.

`stage_meta.json` in the job's folder holds the results of finished stages, which are not run again.
A stage has explorer, trainer and engine on one event loop of this process, or a launcher starts
each in its own; `launch/modes.py` runs them together.

`trireme run --compare` asks what the reinforcement stage's time would have bought as more
supervised training. The supervised stage resumes from its end, for as many steps as fit in that
time, so that a rise by reinforcement cannot be due to too little supervised training.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import prove
from trireme.config import ConfigError, Plan, Problem
from trireme.config.launcher import launcher_named
from trireme.engines.device import ColocationLock, Device, return_freed_memory
from trireme.engines.engine import ServedEngine
from trireme.files import Unreadable, read_json, write_json
from trireme.launch import GC_THRESHOLDS
from trireme.launch.explorer_side import ExplorerSide, lone_explorer
from trireme.launch.models import load_models
from trireme.launch.modes import run_mode
from trireme.launch.open_run import open_run
from trireme.launch.outside import others_copies
from trireme.launch.results import StageResult, accuracy, explored, rewards_of, sampled, summarise
from trireme.launch.resume import continued
from trireme.launch.servers import engine_servers
from trireme.launch.stage import Stage
from trireme.launch.stop import Stop
from trireme.launch.trainer_side import TrainerSide
from trireme.monitor.console import Console
from trireme.monitor.figures import Summary
from trireme.registry import MODES

COMPARISON = "more_sft"
"""The folder and stage name of the run that `--compare` adds."""
ANEW = "add --fresh, or set another name"
"""How a command whose run is finished begins another one."""


def run_stages(
    plans: Sequence[Plan], *, console: Console, stop: Stop, compare_sft: bool = False
) -> Summary:
    """Run every unfinished stage; the summary is shown and written (see `_summary_folder`).

    `compare_sft` spends the reinforcement stage's time on more supervised training as well.
    """
    if problems := others_copies(plans):
        raise ConfigError(problems)
    disable_progress_bar()  # the console shows progress; another bar would break its display
    started = time.monotonic()
    job = plans[0].root_dir
    finished = finished_stages(job) if len(plans) > 1 else []
    _refuse_other_stages(job, [one.name for one in finished], [plan.stage_name for plan in plans])
    trained = next((n for n, plan in enumerate(plans) if plan.mode in ("bench", "serve")), None)
    finished = finished[:trained]  # a stage that measures or serves is never finished
    results = list(finished)
    for plan in map(continued, plans[len(finished) :]):
        by, total = plan.counted
        console.stage(plan.stage_name, total, by=by, until=plan.until)
        model, last = model_of(plan, results), len(results) == len(plans) - 1
        with rare_collections():
            work = run_plan(plan, model, console, stop=stop, measure_end=last)
            results.append(stop.run(work))
        if len(plans) > 1 and (trained is None or len(results) <= trained):
            rows = [asdict(result) for result in results]
            meta = {"latest_stage": len(results) - 1, "finished": rows}
            write_json(JobFolder(job).stage_meta, meta)
    if len(finished) == len(plans):
        done = f"nothing was left to do: all {len(plans)} stages are done ({job})"
        console.note(f"{done}. To start a new run, {ANEW}")
    folder = _summary_folder(job, plans[-1])
    summary = summarise(results, job, plans)
    summary.wall_s = time.monotonic() - started
    compared = more_supervised(plans, results, console, stop) if compare_sft else None
    idle = compared is None and all(result.idle for result in results[len(finished) :])
    if idle and (earlier := Summary.of_earlier(folder)) is not None:
        summary = earlier
    else:
        if compared is not None:
            summary.accuracy_more_sft = accuracy(compared.last, summary.taskset)
            summary.phases[f"{compared.name} train"] = compared.phases["train"]
            summary.wall_s = time.monotonic() - started
        summary.write(folder)
    console.finish(summary, rewards_of(plans[-1]), sampled(plans[-1]))
    if plans[-1].mode == "explore":
        console.note(explored(plans[-1], results[-1].steps))
    return summary


def _summary_folder(job: Path, plan: Plan) -> Path:
    """Return the folder of a command's summary: the job's own is that of the command that trains,
    which shows it again once it has finished.
    """
    monitor = JobFolder(job, plan.explorer_name).monitor
    if plan.mode in ("both", "train"):
        return job
    return monitor if plan.mode == "explore" else monitor / plan.mode


@contextmanager
def rare_collections() -> Iterator[None]:
    """Exclude all present objects from Python's garbage collection, and collect rarely.

    A full collection of the objects of torch, transformers and a run takes a quarter of a second
    and holds the interpreter's lock; with Python's default thresholds it happens every few steps.
    What an earlier stage has left is freed before. Where the process had frozen objects of its own,
    all stay frozen at the end: Python cannot thaw some of them.
    """
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    return_freed_memory()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not frozen:
            gc.unfreeze()


def finished_stages(job: Path) -> list[StageResult]:
    """Return the results of the finished stages."""
    path = JobFolder(job).stage_meta
    try:
        known = {item.name for item in fields(StageResult)}  # another version had others
        rows = read_json(path)["finished"]
        return [StageResult(**{key: row[key] for key in row if key in known}) for row in rows]
    except FileNotFoundError:
        return []
    except (KeyError, TypeError) as error:
        raise Unreadable(f"{path} does not say which stages are done") from error


def _refuse_other_stages(
    job: Path, finished: Sequence[str | None], stages: Sequence[str | None]
) -> None:
    """Raise ConfigError if the first stages are not those that are done: a later one begins with
    the model of an earlier one.
    """
    for number, name in enumerate(finished):
        if number >= len(stages) or stages[number] != name:
            now = f"is '{stages[number]}'" if number < len(stages) else "is not there"
            was = f"the stage of {job} that is done there was '{name}'"
            text = f"{now}, and {was}: expected the same; to start a new run, {ANEW}"
            raise ConfigError([Problem(f"stages[{number}]", text)])


def model_of(plan: Plan, results: Sequence[StageResult]) -> str:
    """Return the path of a stage's model: the plan's, or the last checkpoint of an earlier
    stage.
    """
    if plan.model_from_stage is None:
        return plan.model_path
    model = results[plan.model_from_stage].model_dir
    if model is None:
        raise ValueError(
            f"stage '{plan.stage_name}' begins with the model of stage "
            f"'{results[plan.model_from_stage].name}', which saved none"
        )
    prove(Path(model))
    return model


def refuse_comparison(plans: Sequence[Plan]) -> None:
    """Raise ValueError if `--compare` has nothing to compare."""
    kinds = [plan.config.algorithm.algorithm_type for plan in plans]
    explores = bool(plans) and plans[-1].mode == "both"
    if len(plans) != 2 or kinds[0] != "sft" or not explores:
        raise ValueError(
            "--compare needs two stages, first sft and then one that explores and trains; "
            f"this configuration has {', '.join(kinds)}"
        )


def more_supervised(
    plans: Sequence[Plan], results: Sequence[StageResult], console: Console, stop: Stop
) -> StageResult | None:
    """Run the comparison; None if a stage took no time because everything was done before."""
    supervised, reinforced = results
    seconds = reinforced.whole_seconds("explore", "train")
    taken = supervised.whole_seconds("train")
    if supervised.model_dir is None or not (taken and supervised.steps and seconds):
        return None
    steps = max(1, round(seconds * supervised.steps / taken))
    plan = replace(
        plans[0],
        stage_name=COMPARISON,
        job_dir=plans[0].root_dir / COMPARISON,
        model_from_stage=0,
        steps=replace(plans[0].steps, train=steps, schedule=steps, passes=None),
        notes=(),
    )
    console.stage("more SFT, for comparison", steps)
    with rare_collections():
        return stop.run(run_plan(plan, supervised.model_dir, console, stop=stop))


async def run_plan(
    plan: Plan, model_path: str, console: Console, *, stop: Stop, measure_end: bool = True
) -> StageResult:
    """Run one stage to its end. Raises the first error of a failure, and Stopped if `stop` is
    requested.

    `measure_end`: a supervised stage evaluates its model at the end; not if the next stage begins
    with the same evaluation.
    """
    stop.begin(plan)
    started = time.monotonic()
    device = Device()
    try:
        with open_run(plan, model_path, device, console) as (stage, following):
            if plan.mode == "both" and not plan.places.spread:
                _ = stage.raw_record  # another job's is refused before a model is loaded
                if plan.store.kind == "queue":
                    _ = stage.buffer
            if plan.mode == "train" and not plan.places.spread:
                _ = stage.buffer  # its heartbeats tell the explorers that a trainer is starting
            if plan.places.spread:
                result = await launcher_named(plan.places.launcher).run(stage, stop, measure_end)
            elif plan.engine.served:
                work = partial(_run_here, stage, stop, measure_end)
                result = await engine_servers().run(plan, model_path, work)
            else:
                result = await _run_here(stage, stop, measure_end)
            result.warnings = [warning for one in following for warning in one.end()]
    finally:
        device.close()
    result.seconds = time.monotonic() - started
    result.resumed_from = stage.resumed.step if stage.resumed else 0
    if result.ended_by:
        console.note(result.ended_by)
    elif stage.resumed is not None and result.steps == result.resumed_from:
        result.idle = True
        console.note(nothing_left(plan, result.steps))
    elif plan.mode in ("both", "train") and result.steps < _steps_to_make(plan):
        which, why = "the data set", "rows that leave nothing to train"
        if plan.store.kind != "file":
            which = "the rollouts"
            why = "groups that are left out, of equal rewards for example, and failed rollouts"
            if plan.mode == "train":  # another command explores
                why = f"fewer explore steps, {why}"
        console.note(
            f"{which} ended with train step {result.steps} of {plan.steps.train}: {why} make the "
            "steps fewer, and the learning rate's schedule was for all of them"
        )
    return result


def _steps_to_make(plan: Plan) -> int:
    """Return the train steps that a plan announces; fewer than `trainer.total_steps` if its tasks
    do not give as many, of which it has a note.
    """
    train, given = plan.steps.train or 0, plan.steps.train_given
    return train if plan.mode == "train" or given is None else min(train, given)


def nothing_left(plan: Plan, steps: int) -> str:
    """Explain that an attempt found its run finished, and how to extend it."""
    config, most = plan.config, plan.config.trainer.total_steps
    keys = {
        "trainer.total_steps": most if most and most <= steps else None,  # else the tasks ended it
        "buffer.total_steps": config.buffer.total_steps,
    }
    ends = [f"{key} ({value})" for key, value in keys.items() if value]
    more = " and ".join(ends) or f"buffer.total_epochs ({config.buffer.total_epochs})"
    at = f"step {steps} was this run's last"
    if plan.steps.train and steps > plan.steps.train:  # perhaps another configuration's run
        at = f"{plan.job_dir} holds a run at step {steps}, past the {plan.steps.train} requested"
    remedy = f"raise {more}"
    others = plan.mode == "train" and plan.store.kind != "file"  # they fill its store
    if others and plan.steps.train is None:
        at += ", and the command that fills its buffer has ended"
        remedy = "start that command again, and then this one"
    return f"nothing was left to do: {at}. To train on, {remedy}; to start a new run, {ANEW}"


async def _run_here(
    stage: Stage, stop: Stop, measure_end: bool, remote: ServedEngine | None = None
) -> StageResult:
    """Run the plan's mode with its sides in this process, and with an embedded engine if there is
    no `remote` one.
    """
    plan = stage.plan
    if plan.sync.takes_turns and remote is not None:
        lock = ColocationLock(remote, timeout=plan.config.synchronizer.sync_timeout)
        stage.device.colocation = remote.colocation = lock
        if remote.servers is not None:
            remote.servers.colocation = lock
    if plan.mode in MODES:
        return await MODES.get(plan.mode)(stage, remote, stop)
    engine = trainer = explorer = None
    async with AsyncExitStack() as opened:
        if stage.trains:
            both = plan.mode == "both"
            async with stage.device.turn():  # a resumed optimizer's state may be as large as a step
                models = load_models(stage)
            if both or (stage.recipe.from_data and stage.eval_tasksets):
                engine = remote or await stage.embedded_engine(models.backend)
                opened.push_async_callback(engine.close)
            side = trainer = TrainerSide(stage, models, engine)
            stop.end_work, stop.waits_for = side.trainer.stop, lambda: side.trainer.doing
            if engine is not None:
                opened.enter_context(stage.exploring())
                explorer = ExplorerSide(stage, engine, side.buffer if both else None, side.sync)
                opened.push_async_callback(explorer.close)
                side.explorer_state = explorer.explorer.state if both else None
        else:
            if plan.api is not None:
                timeout = plan.config.explorer.max_timeout
                engine = plan.api.make(stage.text.tokenizer, plan.lengths.max_model_len, timeout)
            else:
                engine = remote or await stage.embedded_engine()
            opened.push_async_callback(engine.close)
            opened.enter_context(stage.exploring())
            explorer = await lone_explorer(stage, engine)
            opened.push_async_callback(explorer.close)
        result = await run_mode(stage, trainer, explorer, measure_end=measure_end)
        if plan.mode == "bench" and engine is not None:
            engine.health()  # if the API failed, the evaluation counts for nothing
        return result

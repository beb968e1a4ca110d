"""Open run: opens a stage in the process that is the run, or starts its others.

The stage is validated, and its stream of events has `metrics.jsonl` and the listeners that
manifests name, which begin where the checkpoint does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trireme.config import ConfigError, Plan, Problem
from trireme.engines.device import Device
from trireme.launch.engines import examine_auxiliary
from trireme.launch.listeners import RunListener, listeners
from trireme.launch.resume import refuse_other_run
from trireme.launch.stage import Stage, open_stage
from trireme.log import get_logger
from trireme.monitor.events import Listener, Noted
from trireme.monitor.monitor import JsonLinesMonitor
from trireme.processes import environment
from trireme.workflows.examine import examine_taskset

logger = get_logger("launcher")


@contextmanager
def open_run(
    plan: Plan, model_path: str, device: Device, console: Listener
) -> Iterator[tuple[Stage, Sequence[RunListener]]]:
    """Open a stage that is its own run: validated, with `metrics.jsonl` and all listeners.

    Raises ConfigError if the run cannot be.
    """
    with open_stage(plan, model_path, device, console, alone=True) as stage:
        for note in plan.notes:
            logger.info(note)
        _validate(stage)
        following = [*listeners().values()]
        if stage.resumed is not None:
            refuse_other_run(stage, stage.resumed)
        _refuse_other_tasks(stage)
        for one in following:
            one.begin(stage)
        metrics = JsonLinesMonitor(stage.folder.monitor)
        metrics.keep_until(stage.steps_that_count)
        stage.stream.subscribe(metrics)
        if stage.resumed is not None:
            logger.info(line := f"resuming from {stage.folder.step_dir(stage.resumed.step)}")
            stage.emit(Noted(line))
        for one in following:
            one.listen(stage)
        yield stage, following


def _refuse_other_tasks(stage: Stage) -> None:
    """Raise ConfigError if the tasks cannot continue where the last attempt's ended."""
    explored = stage.explored
    if stage.taskset is None or not explored or not explored["taskset"]:
        return
    try:
        stage.taskset.load_state(explored["taskset"])  # as the explorer does later
    except ValueError as error:
        raise ConfigError([Problem("", str(error))]) from error


def _validate(stage: Stage) -> None:
    """Raise ConfigError for invalid parts and options, before a model is loaded."""
    newest = stage.plan.config.explorer.bench_on_latest_checkpoint
    try:
        if stage.plan.mode == "bench" and newest and not stage.folder.steps():
            raise ValueError(f"mode bench: there is no checkpoint in {stage.folder.root}")
        _ = stage.operators  # made now, and used by the run
        with environment(stage.plan.config.explorer.env_vars):
            examine_auxiliary(stage.plan, teacher=stage.recipe.needs_teacher)
            for taskset in (stage.taskset, *stage.eval_tasksets):
                if taskset is not None:
                    examine_taskset(taskset, stage.plan, stage.recipe)
        if stage.reads_file:  # reports a malformed row now
            _ = stage.buffer
    except (ValueError, ImportError) as error:
        raise ConfigError([Problem("", str(error))]) from error

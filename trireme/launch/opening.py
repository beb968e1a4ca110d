"""Opening: compares a resume with the start before it, and opens the run's monitors.

Monitors and the watchdog begin where the checkpoint does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trireme.config import ConfigError, Plan, Problem
from trireme.engines.device import Device
from trireme.experience import Experience
from trireme.explorer.explorer import explorer_state
from trireme.launch.changes import changes, refuse_meaningless
from trireme.launch.data import examine_taskset
from trireme.launch.engines import examine_auxiliary
from trireme.launch.stage import Console, Stage, open_stage
from trireme.launch.starts import add_start, read_starts, same_part, this_start
from trireme.log import get_logger
from trireme.monitor.causes import Facts
from trireme.monitor.monitor import Monitors, open_monitor
from trireme.monitor.trackers import TrackedRun
from trireme.monitor.watchdog import Alarm, sample_of

logger = get_logger("launcher")


class Monitored:
    """What a run's parts say: to the watchdog, the monitors and the console."""

    def __init__(self, console: Console, monitor: Monitors, alarm: Alarm) -> None:
        self._console = console
        self._monitor = monitor
        self._alarm = alarm

    def note(self, text: str) -> None:
        """See Console."""
        self._console.note(text)

    def step(self, part: str, step: int, metrics: Mapping[str, float]) -> None:
        """See Console."""
        metrics = self._alarm.look(part, step, metrics)
        self._monitor.log(metrics, step, part)
        self._console.step(part, step, metrics)

    def rollout(self, experience: Experience) -> None:
        """See Console."""
        self._alarm.watchdog.sample = sample_of(experience)
        self._monitor.rollout(experience)
        self._console.rollout(experience)

    def warnings(self) -> list[dict[str, Any]]:
        """What the watchdog has seen, now that no step follows."""
        return self._alarm.end()


@contextmanager
def open_run(
    plan: Plan, model_path: str, device: Device, console: Console
) -> Iterator[tuple[Stage, Monitored]]:
    """A stage that is a run of its own: checked, with the run's monitors and its watchdog.

    Raises ConfigError for a run that cannot be.
    """
    with open_stage(plan, model_path, device, console, alone=True) as stage:
        for note in plan.notes:
            logger.info(note)
        _validate(stage)
        start = this_start(plan, model_path, stage.recipe, stage.resumed)
        explored = _explored(stage)
        lines = _since_last_start(stage, explored, start)
        folder, config = stage.folder, plan.config
        goes_on = stage.resumed is not None or explored is not None
        alone = "explorer" if plan.mode == "explore" else None
        if plan.mode == "train" and not stage.reads_file:
            alone = "trainer"
        name = "-".join(filter(None, (config.name, plan.stage_name)))
        monitor = open_monitor(
            TrackedRun(folder.monitor, config.project, config.group, name, start["config"]),
            config.monitor.monitor_type,
            _steps_that_count(stage),
            args=config.monitor.monitor_args,
            part=alone or "",
        )
        stage.held.push(lambda kind, *_: monitor.close(failed=kind is not None))
        facts = Facts.of(plan, stage.recipe)
        alarm = Alarm(facts, folder.monitor, goes_on=goes_on, alone=alone)
        add_start(folder, start)
        for line in lines:
            logger.info(line)
            console.note(line)
        stage.console = monitored = Monitored(console, monitor, alarm)
        yield stage, monitored


def _validate(stage: Stage) -> None:
    """Raise ConfigError for parts and options that cannot be, before a model is loaded."""
    try:
        _ = stage.operators  # made now, and used by the run
        examine_auxiliary(stage.plan)
        for taskset in (stage.taskset, *stage.eval_tasksets):
            if taskset is not None:
                examine_taskset(taskset, greedy_run=stage.recipe.greedy_run)
        if stage.reads_file:  # a malformed row is named now
            _ = stage.buffer
    except (ValueError, ImportError) as error:
        raise ConfigError([Problem("", str(error))]) from error


def _explored(stage: Stage) -> dict[str, Any] | None:
    """Where the explorer stood when the run last ended; None: it begins."""
    plan, resumed = stage.plan, stage.resumed
    if plan.mode == "explore":
        own = stage.folder.state_of(plan.config.explorer.name)
        return explorer_state(own) if own.exists() else None
    return resumed.run_state.get("explorer") if resumed else None


def _since_last_start(
    stage: Stage, explored: dict[str, Any] | None, start: dict[str, Any]
) -> list[str]:
    """What a resume goes on from, and what has changed; nothing where a run begins.

    Raises ConfigError for a resume that cannot be.
    """
    folder, resumed = stage.folder, stage.resumed
    if resumed is None and explored is None:
        return []
    earlier = [old for old in read_starts(folder) if same_part(old, start)]
    old = earlier[-1] if earlier else None
    lines = []
    if resumed is not None:
        refuse_meaningless(
            stage.plan, stage.model_path, folder, resumed.step, stage.recipe, old, start
        )
        lines = [f"going on from {folder.step_dir(resumed.step)}"]
    if old is None:
        return [*lines, "what has changed since its last start is not known: no run/ tells it"]
    state = explored or {"step": resumed.step if resumed else 0, "taskset": {}}
    train = resumed.step if resumed else state["step"]
    row = state["taskset"].get("current_index")
    found = changes(old, start, train=train + 1, explore=state["step"] + 1, row=row)
    if not found:
        return [*lines, "nothing has changed since its last start"]
    return [*lines, f"changed since its last start ({old['time']}):", *(f"  {f}" for f in found)]


def _steps_that_count(stage: Stage) -> dict[str, int]:
    """Of each part whose steps come anew from here on, the last that does not."""
    resumed, mode = stage.resumed, stage.plan.mode
    step = resumed.step if resumed else 0
    if mode == "train" and not stage.recipe.from_data:
        return {"trainer": step}
    if mode not in ("both", "train"):
        return {}
    state = resumed.run_state if resumed else {}
    explored = state.get("explorer", {"step": step})["step"]
    return {"trainer": step, "explorer": explored, "eval": explored}

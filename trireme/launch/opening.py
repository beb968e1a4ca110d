"""Opening: compares a resume with the start before it, and opens the run's monitors.

Monitors and the watchdog begin where the checkpoint does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trireme.config import ConfigError, Problem
from trireme.explorer.explorer import explorer_state
from trireme.launch.auxiliary import examine_auxiliary
from trireme.launch.changes import changes, refuse_meaningless
from trireme.launch.data import examine_taskset
from trireme.launch.starts import add_start, read_starts, same_part, this_start
from trireme.log import get_logger
from trireme.monitor.causes import Facts
from trireme.monitor.monitor import Monitors, open_monitor
from trireme.monitor.trackers import TrackedRun
from trireme.monitor.watchdog import Alarm

if TYPE_CHECKING:
    from trireme.launch.session import Session

logger = get_logger("launcher")


def open_run(session: Session) -> tuple[Monitors, Alarm]:
    """The run's monitors and its watchdog. Raises ConfigError for a run that cannot be."""
    plan, folder = session.plan, session.folder
    for note in plan.notes:
        logger.info(note)
    _examine(session)
    start = this_start(plan, session.model_path, session.recipe, session.resumed)
    explored = _explored(session)
    lines = _since_last_start(session, explored, start)
    goes_on = session.resumed is not None or explored is not None
    facts = Facts.of(plan, session.recipe)
    alone = "explorer" if plan.mode == "explore" else None
    if plan.mode == "train" and not session.reads_file:
        alone = "trainer"
    config = plan.config
    name = "-".join(filter(None, (config.name, plan.stage_name)))
    monitor = open_monitor(
        TrackedRun(folder.monitor, config.project, config.group, name, start["config"]),
        config.monitor.monitor_type,
        _steps_that_count(session),
        args=config.monitor.monitor_args,
        part=alone or "",
    )
    alarm = Alarm(facts, folder.monitor, goes_on=goes_on, alone=alone)
    add_start(folder, start)
    for line in lines:
        logger.info(line)
        session.console.note(line)
    return monitor, alarm


def _examine(session: Session) -> None:
    """Raise ConfigError for parts and options that cannot be, before a model is loaded."""
    try:
        greedy = session.recipe.greedy_run
        _ = session.operators
        examine_auxiliary(session.plan)
        for taskset in (session.taskset, *session.eval_tasksets):
            if taskset is not None:
                examine_taskset(taskset, greedy_run=greedy)
        if session.reads_file:  # a malformed row is named now
            _ = session.buffer
    except (ValueError, ImportError) as error:
        raise ConfigError([Problem("", str(error))]) from error


def _explored(session: Session) -> dict[str, Any] | None:
    """Where the explorer stood when the run last ended; None: it begins."""
    plan, resumed = session.plan, session.resumed
    if plan.mode == "explore":
        own = session.folder.state_of(plan.config.explorer.name)
        return explorer_state(own) if own.exists() else None
    return resumed.run_state.get("explorer") if resumed else None


def _since_last_start(
    session: Session, explored: dict[str, Any] | None, start: dict[str, Any]
) -> list[str]:
    """What a resume goes on from, and what has changed; nothing where a run begins.

    Raises ConfigError for a resume that cannot be.
    """
    folder, resumed = session.folder, session.resumed
    if resumed is None and explored is None:
        return []
    earlier = [old for old in read_starts(folder) if same_part(old, start)]
    old = earlier[-1] if earlier else None
    lines = []
    if resumed is not None:
        refuse_meaningless(
            session.plan, session.model_path, folder, resumed.step, session.recipe, old, start
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


def _steps_that_count(session: Session) -> dict[str, int]:
    """Of each part whose steps come anew from here on, the last that does not."""
    resumed, mode = session.resumed, session.plan.mode
    step = resumed.step if resumed else 0
    if mode == "train" and not session.recipe.from_data:
        return {"trainer": step}
    if mode not in ("both", "train"):
        return {}
    state = resumed.run_state if resumed else {}
    explored = state.get("explorer", {"step": step})["step"]
    return {"trainer": step, "explorer": explored, "eval": explored}

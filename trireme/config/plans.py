"""Plans: from a Config to one Plan a stage, with every problem of every stage found at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from trireme.config.check import check_folder, check_stage
from trireme.config.derive import derive
from trireme.config.load import read_config
from trireme.config.plan import Plan
from trireme.config.problem import ConfigError, Problem
from trireme.config.schema import Config
from trireme.config.stages import Stage, stages_of


def make_plans(config: Config) -> list[Plan]:
    """One Plan a stage (one where there are no stages). Raises ConfigError with all problems."""
    plans, problems = draft_plans(config)
    if problems:
        raise ConfigError(problems)
    return plans


def draft_plans(config: Config) -> tuple[list[Plan], list[Problem]]:
    """The Plans as far as they can be told, and what is wrong with them."""
    root, whole, stages = job_folder(config), Stage(config), stages_of(config)
    check_folder(whole, root)
    loaded = load_all_plugins(whole)
    plans: list[Plan] = []
    for stage in stages:
        stage.plugins_loaded = loaded
        check_stage(stage)
        plans.append(derive(stage, root))
    for name, count in Counter(stage.name for stage in stages).items():
        if count > 1:
            whole.problem("stages", f"has {count} stages named {name!r}: expected one")
    return plans, whole.problems + _shared(stages)


def examine(path: str | Path, overrides: Sequence[str] = ()) -> tuple[list[Plan], list[Problem]]:
    """The Plans of a file as far as they can be told, and all that is wrong in it.

    What a wrong key's section lacks without it is not said as well.
    """
    config, problems = read_config(path, overrides)
    plans, found = draft_plans(config)
    sections = tuple(f"{p.key.rpartition('.')[0]}." for p in problems if "." in p.key)
    rest = [problem for problem in found if not problem.key.startswith(sections)]
    return plans, list(dict.fromkeys(problems + rest))


def load_all_plugins(stage: Stage) -> bool:
    """Import what users extend us with, so that its names are known; False where that fails."""
    # Imported here: it is light, and lies above config, as do the registries (see names.py).
    from trireme.workflows.plugins import load_plugins

    try:
        load_plugins(stage.config.plugins)
    except ConfigError as error:
        stage.problems += error.problems
        return False
    return True


def job_folder(config: Config) -> Path:
    """Where the job's files lie: root/project/group/name, anew where it shall not be continued."""
    parts = [part for part in (config.project, config.group, config.name) if part]
    root = Path(config.checkpoint_root_dir).expanduser()
    folder = (Path.cwd() / root).joinpath(*parts)
    anew = not config.continue_from_checkpoint and config.mode != "bench"
    if anew and folder.is_dir() and any(folder.iterdir()):
        began, now = folder, datetime.now()
        while folder.exists():  # two runs may begin in one second
            folder = began.with_name(f"{began.name}_{now:%Y%m%d%H%M%S}")
            now += timedelta(seconds=1)
    return folder


def _shared(stages: Sequence[Stage]) -> list[Problem]:
    """Every stage's problems; one of all stages is of the global section, and is said once."""
    problems = [problem for stage in stages for problem in dict.fromkeys(stage.problems)]
    times = Counter(replace(problem, stage=None) for problem in problems)
    out: dict[Problem, None] = {}
    for problem in problems:
        shared = replace(problem, stage=None)
        out[shared if times[shared] == len(stages) else problem] = None
    return list(out)

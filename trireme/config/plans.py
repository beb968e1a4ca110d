"""Plans: from a Config to one Plan a stage, with every problem of every stage found at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trireme.config.check import check_stage
from trireme.config.check_model import check_folder, model_size
from trireme.config.derive import derive
from trireme.config.load import read_config
from trireme.config.names import check_plugins
from trireme.config.plan import Plan
from trireme.config.problem import ConfigError, Problem, in_stage
from trireme.config.schema import Config
from trireme.config.stages import stages_of


def make_plans(config: Config) -> list[Plan]:
    """One Plan a stage (one where there are no stages). Raises ConfigError with all problems."""
    plans, problems = draft_plans(config)
    if problems:
        raise ConfigError(problems)
    return plans


def draft_plans(config: Config) -> tuple[list[Plan], list[Problem]]:
    """The Plans as far as they can be told, and what is wrong with them."""
    problems: list[Problem] = []
    root = job_folder(config)
    check_folder(root, model_size(config), problems)
    check_plugins(config.plugins, problems)
    plans: list[Plan] = []
    stages = stages_of(config)
    by_stage: list[Problem] = []
    for stage in stages:
        found: list[Problem] = []
        facts = check_stage(stage, found)
        plan = derive(stage, facts, root, found)
        plans.append(replace(plan, notes=(*plan.notes, *facts.notes)))
        by_stage += in_stage(dict.fromkeys(found), stage.name)
    names = [stage.name for stage in stages]
    for name, count in Counter(names).items():
        if count > 1:
            problems.append(Problem("stages", f"has {count} stages named {name!r}: expected one"))
    return plans, problems + _shared(by_stage, len(stages))


def examine(path: str | Path, overrides: Sequence[str] = ()) -> tuple[list[Plan], list[Problem]]:
    """The Plans of a file as far as they can be told, and all that is wrong in it.

    What a wrong key's section lacks without it is not said as well.
    """
    config, problems = read_config(path, overrides)
    plans, found = draft_plans(config)
    sections = tuple(f"{p.key.rpartition('.')[0]}." for p in problems if "." in p.key)
    rest = [problem for problem in found if not problem.key.startswith(sections)]
    return plans, list(dict.fromkeys(problems + rest))


def job_folder(config: Config) -> Path:
    """Where the job's files lie: root/project/group/name, anew where it shall not be continued."""
    parts = [part for part in (config.project, config.group, config.name) if part]
    root = Path(config.checkpoint_root_dir).expanduser()
    folder = (Path.cwd() / root).joinpath(*parts)
    anew = not config.continue_from_checkpoint and config.mode != "bench"
    if anew and folder.is_dir() and any(folder.iterdir()):
        folder = folder.with_name(f"{folder.name}_{datetime.now():%Y%m%d%H%M%S}")
    return folder


def _shared(problems: list[Problem], num_stages: int) -> list[Problem]:
    """A problem of all stages is one of the global section, and is said once."""
    plain = [replace(problem, stage=None) for problem in problems]
    times = Counter(plain)
    out = (
        shared if times[shared] == num_stages else problem
        for problem, shared in zip(problems, plain, strict=True)
    )
    return list(dict.fromkeys(out))

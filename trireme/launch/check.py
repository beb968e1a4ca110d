"""Check: derives a file's Plans from its stages' parts, and collects all that is wrong.

No model is loaded, and nothing written. What has to be downloaded, asked over the network or
encoded comes where all else is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trireme.config import ConfigError, Plan, Problem
from trireme.config.check import check_folder, job_folder
from trireme.config.launcher import gpus_elsewhere
from trireme.config.load import read_config
from trireme.config.plan import derive
from trireme.config.schema import Config
from trireme.config.stages import StageFacts, stages_of
from trireme.launch.complete import complete
from trireme.launch.hub import without_hub
from trireme.launch.make import make_parts
from trireme.launch.parts import Parts, problems_of
from trireme.launch.prompts import prompt_notes, prompt_problems
from trireme.processes import environment
from trireme.workflows.plugins import load_plugins


class Draft(NamedTuple):
    """The Plans of a file, as far as they can be derived, with their parts."""

    plans: list[Plan]
    problems: list[Problem]
    parts: list[Parts]


def make_plans(config: Config) -> list[Plan]:
    """Make one Plan per stage (one if there are no stages). Raises ConfigError with all
    problems.
    """
    made = draft(config)
    if made.problems:
        raise ConfigError(made.problems)
    return made.plans


def checked(config: Config) -> Draft:
    """Make the Plans and keep the parts that were made. Raises ConfigError if anything cannot run.

    The data that the first stage's trainer reads is encoded when that stage begins.
    """
    made = draft(config)
    problems = list(made.problems)
    if not problems:
        without_hub(made.plans, made.parts)
        for i, (plan, parts) in enumerate(zip(made.plans, made.parts, strict=True)):
            with environment(plan.config.explorer.env_vars):
                complete(plan, parts, data=i > 0)
            parts.findings.problems += prompt_problems(plan, parts.prompts)
        problems = problems_of(made.parts)
    if problems:
        raise ConfigError(problems)
    pairs = zip(made.plans, made.parts, strict=True)
    return made._replace(plans=[_with_prompt_notes(plan, parts) for plan, parts in pairs])


def _with_prompt_notes(plan: Plan, parts: Parts) -> Plan:
    notes = [note for name, prompts in parts.prompts for note in prompt_notes(plan, name, prompts)]
    return replace(plan, notes=(*plan.notes, *notes))


def examine(path: str | Path, overrides: Sequence[str] = ()) -> Draft:
    """Check a file and collect every problem, except follow-up problems of a section with an
    unknown key.
    """
    config, problems = read_config(path, overrides)
    made = draft(config)
    sections = tuple(f"{p.key.rpartition('.')[0]}." for p in problems if "." in p.key)
    rest = [problem for problem in made.problems if not problem.key.startswith(sections)]
    return made._replace(problems=list(dict.fromkeys(problems + rest)))


def draft(config: Config) -> Draft:
    """Derive the Plans as far as possible, and collect their problems."""
    root, stages = job_folder(config), stages_of(config)
    whole = check_folder(StageFacts(config), root)
    loaded = True
    try:
        with environment(config.explorer.env_vars):
            load_plugins(config.plugins)
    except ConfigError as error:
        whole.problems += error.problems
        loaded = False
    parts: list[Parts] = []
    for stage in stages:
        notes = () if parts else config._notes
        with environment(stage.config.explorer.env_vars):
            parts.append(make_parts(stage, notes, names_are_known=loaded))
    gpus = parts[0].findings.take(gpus_elsewhere(stages))
    plans = [_plan_of(made, root, gpus) for made in parts]
    for name, count in Counter(stage.name for stage in stages).items():
        if count > 1:
            whole.problem("stages", f"has {count} stages named {name!r}: expected one")
    return Draft(plans, whole.problems + problems_of(parts), parts)


def _plan_of(parts: Parts, root: Path, gpus: int | None) -> Plan:
    """Derive the Plan of a stage, with all its notes; its problems join those of the parts."""
    stage = parts.stage
    plan = parts.findings.take(derive(stage, root, gpus))
    return replace(plan, notes=(*parts.findings.notes, *parts.file_notes))

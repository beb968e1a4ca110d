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
from trireme.launch import outside, prompts
from trireme.launch.complete import Completed, complete
from trireme.launch.make import make_parts
from trireme.launch.parts import Parts, merge_problems
from trireme.processes import environment
from trireme.workflows.plugins import load_plugins


class Draft(NamedTuple):
    """The Plans of a file, as far as they can be derived, with the parts that were made."""

    plans: list[Plan]
    problems: list[Problem]
    parts: list[Parts]


def make_plans(config: Config) -> list[Plan]:
    """Make one Plan per stage (one if there are no stages). Raises ConfigError with all
    problems.
    """
    if not isinstance(config, Config):
        raise ValueError(f"make_plans takes a Config, as load_config returns it: {config!r:.60}")
    made = draft(config)
    if made.problems:
        raise ConfigError(made.problems)
    return made.plans


def checked(config: Config) -> Draft:
    """Make the Plans and keep the parts that were made. Raises ConfigError if anything cannot run.

    The data that the first stage's trainer reads is encoded when that stage begins.
    """
    made = draft(config)
    if made.problems:
        raise ConfigError(made.problems)
    completed = complete(made.plans, made.parts, first_data=False).stages
    problems = [
        [*one.problems, *prompts.prompt_problems(plan, one.encoded.prompts)]
        for plan, one in zip(made.plans, completed, strict=True)
    ]
    if any(problems):
        raise ConfigError(merge_problems([parts.stage for parts in made.parts], problems))
    plans = map(_with_prompt_notes, made.plans, completed)
    parts = [
        replace(each, rows=(*each.rows, *one.rows))
        for each, one in zip(made.parts, completed, strict=True)
    ]
    return Draft([*plans], [], parts)


def _with_prompt_notes(plan: Plan, completed: Completed) -> Plan:
    encoded = completed.encoded.prompts
    notes = [note for name, each in encoded for note in prompts.prompt_notes(plan, name, each)]
    return replace(plan, notes=(*plan.notes, *notes))


def refuse_old_rows(made: Draft) -> None:
    """Raise ConfigError if a new run would meet an earlier one's experiences, or those of another
    command.
    """
    for plan, parts in zip(made.plans, made.parts, strict=True):
        if parts.recipe is not None and parts.recipe.from_data:
            continue
        if plan.mode not in ("both", "colocate"):
            text = f"is {plan.mode}, whose run's folder other commands name: expected name=... in "
            raise ConfigError([Problem("mode", f"{text}each of them, and no --fresh")])
        buffer = plan.config.buffer.trainer_input.experience_buffer
        inside = plan.store.kind == "queue" or str(plan.job_dir) in plan.store.path
        if not inside and plan.config.name not in buffer.name:
            raise ConfigError(
                [
                    Problem(
                        "buffer.trainer_input.experience_buffer.name",
                        f"is {buffer.name!r}, in a database outside the run's folder that may hold "
                        f"an earlier run's rows: expected one with the new run's name in it, for "
                        f"example {plan.config.name}, or no --fresh",
                    )
                ]
            )


def examine(path: str | Path, overrides: Sequence[str] = ()) -> Draft:
    """Check a file and collect every problem, except follow-up problems of a section with an
    unknown key, and of one whose value is none.
    """
    config, problems = read_config(path, overrides)
    made = draft(config)
    wrong = [p.key for p in problems] + [p.key.rpartition(".")[0] for p in problems if "." in p.key]
    within = tuple(f"{key}." for key in wrong)
    rest = [p for p in made.problems if p.key not in wrong and not p.key.startswith(within)]
    rest += outside.others_copies(made.plans)
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
    parts, findings = [], []
    for stage in stages:
        notes = () if parts else config._notes
        with environment(stage.config.explorer.env_vars):
            made, found = make_parts(stage, notes, names_are_known=loaded)
        parts.append(made)
        findings.append(found)
    gpus = findings[0].take(gpus_elsewhere(stages))
    plans = []
    for made, found in zip(parts, findings, strict=True):
        plan = found.take(derive(made.stage, root, gpus))
        plans.append(replace(plan, notes=(*found.notes, *found.last_notes)))
    for name, count in Counter(stage.name for stage in stages).items():
        if count > 1:
            whole.problem("stages", f"has {count} stages named {name!r}: expected one")
    whole.problems += outside.shared_copies(plans)
    each = merge_problems(stages, [found.problems for found in findings])
    return Draft(plans, whole.problems + each, parts)

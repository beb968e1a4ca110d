"""Complete: checks stages by what has to be downloaded, asked over the network or encoded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from trireme.config import Findings, Plan, Problem
from trireme.config.lookup import located, near_model, why_no_hub
from trireme.data.rows import Rows
from trireme.launch.data import try_data
from trireme.launch.engines import examine_auxiliary
from trireme.launch.listeners import listeners
from trireme.launch.parts import Parts, tried
from trireme.launch.prompts import Encoded, encode_prompts
from trireme.launch.tasksets import make_eval_tasksets, make_training_taskset
from trireme.processes import environment
from trireme.registry import STEERINGS
from trireme.trainer.steering import examine_steering
from trireme.workflows.examine import examine_taskset


class Completed(NamedTuple):
    """A stage whose data and models were looked at."""

    problems: tuple[Problem, ...]
    rows: tuple[Rows, ...] = ()
    """The rows of all tasksets, also those that were downloaded."""
    encoded: Encoded = Encoded()


class Completion(NamedTuple):
    """The stages of a file, and whether only this machine was looked at."""

    stages: list[Completed]
    no_hub: str
    """Why nothing can be downloaded, if something must be."""


def complete(
    plans: Sequence[Plan], parts: Sequence[Parts], *, first_data: bool = True
) -> Completion:
    """Fetch what the Plans need from elsewhere, probe external models, and encode some prompts.

    `first_data`: also encode all rows that the first stage's trainer reads itself, as all others
    do. If the hub does not answer, this process does not ask it again: each attempt costs a minute
    of retries.
    """
    no_hub = ""
    if any("will be downloaded" in note for plan in plans for note in plan.notes):
        no_hub = why_no_hub()
    stages = []
    for i, (plan, made) in enumerate(zip(plans, parts, strict=True)):
        with environment(plan.config.explorer.env_vars):
            stages.append(complete_stage(plan, made, no_hub, data=first_data or i > 0))
    return Completion(stages, no_hub)


def complete_stage(plan: Plan, parts: Parts, no_hub: str, *, data: bool) -> Completed:
    """Complete one stage. `data`: also encode all rows that a trainer reads itself."""
    findings, recipe, path = Findings(), parts.recipe, plan.model_path
    assert recipe is not None, "a stage with problems"
    elsewhere = plan.places.spread or plan.api or plan.model_from_stage is not None
    if no_hub and not elsewhere and located(path, "models") is None:
        wanted = near_model(path) or ": expected a model's folder, or one downloaded before"
        text = f"({path}) is not on this machine, and {no_hub}{wanted}"
        findings.problem("model.model_path", text)
    tried(findings, lambda: examine_auxiliary(plan, teacher=recipe.needs_teacher))
    for listener in listeners().values():
        problems = tried(findings, lambda one=listener: [*one.examine(plan)])
        findings.problems += problems or ()
    for name in STEERINGS:
        findings.problems += tried(findings, partial(examine_steering, name, plan)) or ()
    training, evaluation = parts.training, parts.evaluation
    if not parts.stage.prepares_tasks:  # otherwise reading the rows would write
        if training is None:
            training = tried(findings, lambda: make_training_taskset(plan))
        if None in evaluation:
            evaluation = tried(findings, lambda: make_eval_tasksets(plan)) or ()
    mixtures = [one for one in (training, *evaluation) if one is not None]
    for one in mixtures:
        tried(findings, partial(examine_taskset, one, plan, recipe))
    tasksets = [one for mixed in mixtures for one in getattr(mixed, "tasksets", [mixed])]
    if data:
        tried(findings, partial(try_data, plan, recipe.schema))
    done = Completed(tuple(findings.problems), tuple(one.rows for one in tasksets))
    if findings.problems or plan.mode == "serve" or plan.api:
        return done
    if not tasksets or located(path, "models") is None:
        return done
    encoded = findings.take(encode_prompts(plan, recipe, tasksets))
    return done._replace(problems=tuple(findings.problems), encoded=encoded)

"""Complete: checks stages by what has to be downloaded, asked over the network or encoded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from trireme.algorithms.recipes import Recipe
from trireme.checkpoint.layout import JobFolder
from trireme.config import Findings, Plan, Problem
from trireme.config.lookup import located, near_model, why_no_hub
from trireme.data.rows import Rows
from trireme.data.tasksets import Taskset
from trireme.launch.data import make_buffer, make_text
from trireme.launch.engines import examine_auxiliary, teacher_len
from trireme.launch.listeners import listeners
from trireme.launch.parts import Parts, tried
from trireme.launch.prompts import Prompts, check_teacher_prompts, first_prompts
from trireme.launch.read import prepares_tasks
from trireme.launch.tasksets import examine_taskset, make_eval_tasksets, make_training_taskset
from trireme.processes import environment
from trireme.registry import STEERINGS
from trireme.trainer.steering import examine_steering
from trireme.usercode import fault_of


class Completed(NamedTuple):
    """A stage whose data and models were looked at."""

    problems: tuple[Problem, ...]
    rows: tuple[Rows, ...] = ()
    """The rows of all tasksets, also those that were downloaded."""
    prompts: tuple[tuple[str, Prompts], ...] = ()
    """The encoded prompts by taskset name; empty if there are problems, or if only the workflow
    knows them."""
    unread: str = ""
    """Why no prompt was encoded."""


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
            missing = check_download(plan, no_hub) if no_hub else Findings()
            done = complete_stage(plan, made, data=first_data or i > 0)
        stages.append(done._replace(problems=(*missing.problems, *done.problems)))
    return Completion(stages, no_hub)


def check_download(plan: Plan, no_hub: str) -> Findings:
    """Report a model that is missing while nothing can be downloaded."""
    findings, path = Findings(), plan.model_path
    if plan.places.spread or plan.api or plan.model_from_stage is not None:
        return findings  # another machine may have the model
    if located(path, "models") is None:
        text = f"({path}) is not on this machine, and {no_hub}{near_model(path)}"
        findings.problem("model.model_path", text)
    return findings


def complete_stage(plan: Plan, parts: Parts, *, data: bool = True) -> Completed:
    """Complete one stage. `data`: also encode all rows that a trainer reads itself."""
    findings, recipe = Findings(), parts.recipe
    assert recipe is not None, "a stage with problems"
    tried(findings, lambda: examine_auxiliary(plan, teacher=recipe.needs_teacher))
    for listener in listeners().values():
        problems = tried(findings, lambda one=listener: [*one.examine(plan)])
        findings.problems += problems or ()
    for name in STEERINGS:
        findings.problems += tried(findings, partial(examine_steering, name, plan)) or ()
    training, evaluation = parts.training, parts.evaluation
    if not prepares_tasks(parts.stage):  # otherwise reading the rows would write
        if training is None:
            training = tried(findings, lambda: make_training_taskset(plan))
        if None in evaluation:
            evaluation = tried(findings, lambda: make_eval_tasksets(plan)) or ()
    mixtures = [one for one in (training, *evaluation) if one is not None]
    for one in mixtures:
        tried(findings, partial(examine_taskset, one, plan, recipe))
    tasksets = [one for mixed in mixtures for one in getattr(mixed, "tasksets", [mixed])]
    if data and plan.store.kind == "file":
        folder, read = JobFolder(plan.job_dir), partial(make_text, plan, plan.model_path)
        tried(findings, lambda: make_buffer(plan, folder, read(), schema=recipe.schema))
    done = Completed(tuple(findings.problems), tuple(one.rows for one in tasksets))
    if findings.problems or plan.mode == "serve" or plan.api:
        return done
    if not tasksets or located(plan.model_path, "models") is None:
        return done
    return encode_prompts(plan, recipe, tasksets, done)


def encode_prompts(
    plan: Plan, recipe: Recipe, tasksets: Sequence[Taskset], done: Completed
) -> Completed:
    """Encode the first prompts of all tasksets, and check those of a teacher."""
    findings = Findings()
    try:
        text = make_text(plan, plan.model_path)
        encoded = [(taskset.name, first_prompts(text, taskset)) for taskset in tasksets]
    except (ValueError, OSError) as error:  # for example, no tokenizer next to the model
        if (fault := fault_of(error)) is None:
            return done._replace(unread=str(error))
        findings.problem("", str(fault))
        return done._replace(problems=tuple(findings.problems))
    if recipe.needs_teacher:
        limit = teacher_len(plan)
        for taskset in tasksets:
            if not taskset.is_eval:
                tried(findings, partial(check_teacher_prompts, text, taskset, limit))
    prompts = tuple((name, prompts) for name, prompts in encoded if prompts is not None)
    return done._replace(problems=tuple(findings.problems), prompts=prompts)

"""Complete: checks a stage by what has to be downloaded, asked over the network or encoded."""

from __future__ import annotations

from functools import partial

from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.config.lookup import located
from trireme.launch.data import make_buffer, make_text
from trireme.launch.engines import examine_auxiliary, teacher_len
from trireme.launch.listeners import listeners
from trireme.launch.parts import Parts
from trireme.launch.prompts import check_teacher_prompts, first_prompts
from trireme.launch.read import prepares_tasks
from trireme.launch.tasksets import examine_taskset, make_eval_tasksets, make_training_taskset
from trireme.registry import STEERINGS
from trireme.trainer.steering import examine_steering
from trireme.usercode import fault_of


def complete(plan: Plan, parts: Parts, *, data: bool = True) -> None:
    """Fetch what the Plan needs from elsewhere, probe external models, and encode some prompts.

    `data`: also encode all rows that a trainer reads itself. Errors become problems of the stage.
    """
    recipe = parts.recipe
    assert recipe is not None, "a stage with problems"
    parts.tried(lambda: examine_auxiliary(plan, teacher=recipe.needs_teacher))
    for listener in listeners().values():
        parts.findings.problems += parts.tried(lambda one=listener: [*one.examine(plan)]) or ()
    for name in STEERINGS:
        parts.findings.problems += parts.tried(partial(examine_steering, name, plan)) or ()
    if not prepares_tasks(parts.stage):  # otherwise reading the rows would write
        if parts.training is None:
            parts.training = parts.tried(lambda: make_training_taskset(plan))
        if None in parts.evaluation:
            parts.evaluation = list(parts.tried(lambda: make_eval_tasksets(plan)) or ())
    tasksets = [one for one in (parts.training, *parts.evaluation) if one is not None]
    needs = {"greedy_run": recipe.greedy_run, "rewards_teach": recipe.rewards_teach}
    for taskset in tasksets:
        parts.tried(partial(examine_taskset, taskset, plan, **needs))
    if data and plan.store.kind == "file":
        folder, read = JobFolder(plan.job_dir), partial(make_text, plan, plan.model_path)
        parts.tried(lambda: make_buffer(plan, folder, read(), schema=recipe.schema))
    if parts.findings.problems or plan.mode == "serve" or plan.api:
        return
    if located(plan.model_path, "models") is None:
        return
    each = [one for taskset in tasksets for one in getattr(taskset, "tasksets", [taskset])]
    if not each:
        return
    try:
        text = make_text(plan, plan.model_path)
        encoded = [(taskset.name, first_prompts(text, taskset)) for taskset in each]
    except (ValueError, OSError) as error:  # for example, no tokenizer next to the model
        if (fault := fault_of(error)) is None:
            parts.unread = str(error)
        else:
            parts.findings.problem("", str(fault))
        return
    parts.prompts = [(name, prompts) for name, prompts in encoded if prompts is not None]
    if recipe.needs_teacher:
        for taskset in getattr(parts.training, "tasksets", [parts.training]):
            if taskset is not None:
                check = partial(check_teacher_prompts, text, taskset, teacher_len(plan))
                parts.tried(check)

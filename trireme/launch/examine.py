"""Examine: all that is wrong with the parts that a plan names, found by making what is light.

For `trireme check`, and before a run: no model is loaded and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trireme.config import Plan
from trireme.data.mixture import Mixture
from trireme.data.tasksets import Taskset
from trireme.launch.auxiliary import examine_auxiliary
from trireme.launch.parts.stores import make_file_buffer, make_operators
from trireme.launch.parts.tasks import examine_taskset, make_eval_tasksets, make_training_taskset
from trireme.launch.parts.text import make_text
from trireme.launch.parts.training import make_recipe
from trireme.usercode import fault_of

T = TypeVar("T")


def part_problems(plan: Plan, *, data: bool = True) -> list[str]:
    """One sentence for each part that cannot be made, or whose options or rows are wrong.

    `data`: also the rows that a trainer reads by itself, which are encoded for that.
    """
    problems: list[str] = []

    def tried(make: Callable[[], T]) -> T | None:
        try:
            return make()
        except Exception as error:
            fault = fault_of(error)
            if fault is None and not isinstance(error, ValueError | ImportError | OSError):
                raise
            problems.append(str(fault or error))
            return None

    recipe = tried(lambda: make_recipe(plan))
    tried(lambda: make_operators(plan))
    tried(lambda: examine_auxiliary(plan))
    tasksets: list[Taskset | Mixture | None] = [*(tried(lambda: make_eval_tasksets(plan)) or ())]
    if plan.config.data_processor.task_pipeline is None:  # it would write
        tasksets.append(tried(lambda: make_training_taskset(plan)))
    greedy = recipe is not None and recipe.greedy_run
    for taskset in filter(None, tasksets):
        tried(lambda found=taskset: examine_taskset(found, greedy_run=greedy))
    if data and plan.buffer_type == "file" and recipe is not None:
        rows = plan.config.buffer.trainer_input.experience_buffer
        tried(
            lambda: make_file_buffer(
                plan, rows, make_text(plan, plan.model_path), (), schema=recipe.schema
            )
        )
    return problems

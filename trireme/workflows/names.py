"""Names: what each workflow is called in a YAML, and how a user adds one. Light: loads no part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trireme.registry import Registry

_SIMPLE = "trireme.workflows.single_turn.SimpleWorkflow"
_MATH = "trireme.workflows.single_turn.MathWorkflow"
_MATH_BOXED = "trireme.workflows.single_turn.MathBoxedWorkflow"

WORKFLOW_PATHS = {
    "simple_workflow": _SIMPLE,
    "math_workflow": _MATH,
    "math_boxed_workflow": _MATH_BOXED,
    "async_simple_workflow": _SIMPLE,
    "async_math_workflow": _MATH,
    "async_math_boxed_workflow": _MATH_BOXED,
    "alfworld_workflow": "trireme.workflows.alfworld.AlfworldWorkflow",
    "step_wise_alfworld_workflow": "trireme.workflows.alfworld.StepWiseAlfworldWorkflow",
    "webshop_workflow": "trireme.workflows.webshop.WebShopWorkflow",
    "gym_workflow": "trireme.workflows.gym.GymWorkflow",
    "household_workflow": "trireme.workflows.household.HouseholdWorkflow",
    "reasoning_gym_workflow": "trireme.workflows.reasoning_gym.ReasoningGymWorkflow",
    "sudoku_workflow": "trireme.workflows.sudoku.SudokuWorkflow",
    "textarena_workflow": "trireme.workflows.textarena.TextArenaWorkflow",
}

WORKFLOWS = Registry("workflow", WORKFLOW_PATHS)


def workflow(name: str) -> Callable[[Any], Any]:
    """Decorator: an async function `(task, model)`, or a Workflow class, by this name."""
    return WORKFLOWS.register(name)

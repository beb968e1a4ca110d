"""Names: what each workflow is called in a YAML, and how a user adds one. Light: loads no part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trireme.registry import Registry

_SIMPLE = "trireme.workflows.single_turn.SimpleWorkflow"
_MATH = "trireme.workflows.single_turn.MathWorkflow"
_MATH_EVAL = "trireme.workflows.single_turn.MathEvalWorkflow"
_MATH_RM = "trireme.workflows.single_turn.MathRmWorkflow"
_MATH_RULER = "trireme.workflows.single_turn.MathRulerWorkflow"
_RUBRIC = "trireme.workflows.single_turn.RubricJudgeWorkflow"
_MATH_BOXED = "trireme.workflows.single_turn.MathBoxedWorkflow"

WORKFLOW_PATHS = {
    "simple_workflow": _SIMPLE,
    "math_workflow": _MATH,
    "math_boxed_workflow": _MATH_BOXED,
    "async_simple_workflow": _SIMPLE,
    "async_math_workflow": _MATH,
    "async_math_boxed_workflow": _MATH_BOXED,
    "math_eval_workflow": _MATH_EVAL,
    "async_math_eval_workflow": _MATH_EVAL,
    "math_rm_workflow": _MATH_RM,
    "async_math_rm_workflow": _MATH_RM,
    "math_ruler_workflow": _MATH_RULER,
    "async_math_ruler_workflow": _MATH_RULER,
    "math_trainable_ruler_workflow": "trireme.workflows.self_judge.MathTrainableRulerWorkflow",
    "rubric_judge_workflow": _RUBRIC,
    "on_policy_distill_workflow": "trireme.workflows.distill.OnPolicyDistillWorkflow",
    "on_policy_distill_math_workflow": "trireme.workflows.distill.OnPolicyDistillMathWorkflow",
    "alfworld_workflow": "trireme.workflows.alfworld.AlfworldWorkflow",
    "step_wise_alfworld_workflow": "trireme.workflows.alfworld.StepWiseAlfworldWorkflow",
    "webshop_workflow": "trireme.workflows.webshop.WebShopWorkflow",
    "gym_workflow": "trireme.workflows.gym.GymWorkflow",
    "multi_turn_scheduler": "trireme.workflows.scheduled.multi_turn_scheduler",
    "household_workflow": "trireme.workflows.household.HouseholdWorkflow",
    "reasoning_gym_workflow": "trireme.workflows.reasoning_gym.ReasoningGymWorkflow",
    "sudoku_workflow": "trireme.workflows.sudoku.SudokuWorkflow",
    "textarena_workflow": "trireme.workflows.textarena.TextArenaWorkflow",
}

WORKFLOWS = Registry("workflow", WORKFLOW_PATHS)

_TIPS = "trireme.workflows.math_tips"
MULTI_TURNS = Registry(
    "multi-turn scheduler",
    {
        "math_tip_trick": f"{_TIPS}.MathTips",
        "math_tip_trick_multi_turn": f"{_TIPS}.MathTipsMultiTurn",
        "thinking_tips_scheduler": f"{_TIPS}.ThinkingTips",
        "tool_call_scheduler": "trireme.workflows.tool_calls.ToolCallScheduler",
        "gym_scheduler": "trireme.workflows.gym_scheduler.GymScheduler",
    },
)
"""Schedulers of conversations: see workflows/scheduler.py. `multi_turns` for plug-ins."""

ENVS = Registry("environment")
"""Those of the gym scheduler. `gym_envs` for plug-ins."""
CONTEXT_MANAGERS = Registry("context manager")


def workflow(name: str) -> Callable[[Any], Any]:
    """Decorator: an async function `(task, model)`, or a Workflow class, by this name."""
    return WORKFLOWS.register(name)

"""Import path of workflows."""

from __future__ import annotations

from trireme.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "Task": "trireme.task",
        "WORKFLOWS": "trireme.workflows.names",
        "Workflow": "trireme.workflows.classes",
        "SimpleWorkflow": "trireme.workflows.single_turn",
        "MathWorkflow": "trireme.workflows.single_turn",
        "MathBoxedWorkflow": "trireme.workflows.single_turn",
        "MultiTurnWorkflow": "trireme.workflows.multi_turn",
        "AsyncMultiTurnWorkflow": "trireme.workflows.multi_turn:MultiTurnWorkflow",
        "AsyncSimpleWorkflow": "trireme.workflows.single_turn:SimpleWorkflow",
        "AsyncMathWorkflow": "trireme.workflows.single_turn:MathWorkflow",
        "AsyncMathBoxedWorkflow": "trireme.workflows.single_turn:MathBoxedWorkflow",
        "StepWiseRewardWorkflow": "trireme.workflows.step_wise",
        "RewardPropagationWorkflow": "trireme.workflows.step_wise",
        "AlfworldWorkflow": "trireme.workflows.alfworld",
        "StepWiseAlfworldWorkflow": "trireme.workflows.alfworld",
        "AsyncStepWiseRewardWorkflow": "trireme.workflows.step_wise:StepWiseRewardWorkflow",
        "AsyncRewardPropagationWorkflow": "trireme.workflows.step_wise:RewardPropagationWorkflow",
    },
)

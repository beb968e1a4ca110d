"""Import path of the step-wise workflows."""

from __future__ import annotations

from trireme.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "StepWiseRewardWorkflow": "trireme.workflows.step_wise",
        "RewardPropagationWorkflow": "trireme.workflows.step_wise",
        "AsyncStepWiseRewardWorkflow": "trireme.workflows.step_wise:StepWiseRewardWorkflow",
        "AsyncRewardPropagationWorkflow": "trireme.workflows.step_wise:RewardPropagationWorkflow",
        "StepWiseAlfworldWorkflow": "trireme.workflows.alfworld",
    },
)

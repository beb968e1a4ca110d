"""Import path of workflows, and the place where yours may be registered.

Import the module of a class that registers itself, or give its name and path below: a run loads
this file before it looks at the names in its YAML.
"""

from __future__ import annotations

from trireme.lazy import lazy_names

default_mapping: dict[str, str] = {
    # "my_workflow": "trinity.common.workflows.my_workflow.MyWorkflow",
}

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
        "WebShopWorkflow": "trireme.workflows.webshop",
        "AsyncStepWiseRewardWorkflow": "trireme.workflows.step_wise:StepWiseRewardWorkflow",
        "AsyncRewardPropagationWorkflow": "trireme.workflows.step_wise:RewardPropagationWorkflow",
    },
)

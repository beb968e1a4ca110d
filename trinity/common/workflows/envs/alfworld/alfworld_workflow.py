"""Import path of the ALFWorld workflows."""

from __future__ import annotations

from trireme.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "AlfWORLD_SYSTEM_PROMPT": "trireme.workflows.alfworld:SYSTEM_PROMPT",
        "create_environment": "trireme.workflows.alfworld",
        "format_observation": "trireme.workflows.alfworld",
        "parse_action": "trireme.workflows.alfworld",
        "AlfworldWorkflow": "trireme.workflows.alfworld",
        "StepWiseAlfworldWorkflow": "trireme.workflows.alfworld",
    },
)

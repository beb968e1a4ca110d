"""Import path of the ALFWorld workflows."""

from __future__ import annotations

from trireme.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "AlfworldWorkflow": "trireme.workflows.alfworld",
        "StepWiseAlfworldWorkflow": "trireme.workflows.alfworld",
    },
)

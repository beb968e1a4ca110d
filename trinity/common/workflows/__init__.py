"""Import path of workflows, and the place where yours may be registered.

Import the module of a class that registers itself, or give its name and path below: a run loads
this file before it looks at the names in its YAML.
"""

from __future__ import annotations

from trinity import NAMES
from trireme.registry import lazy_names

_HERE = "trinity.common.workflows"
default_mapping: dict[str, str] = {
    # "my_workflow": f"{_HERE}.my_workflow.MyWorkflow",
    # "alfworld_workflow": f"{_HERE}.envs.alfworld.alfworld_workflow.AlfworldWorkflow",
    # "step_wise_alfworld_workflow": f"{_HERE}.step_wise_workflow.StepWiseAlfworldWorkflow",
}

__getattr__ = lazy_names(__name__, NAMES[__name__])

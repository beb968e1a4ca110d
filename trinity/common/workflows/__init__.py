"""Import path of workflows, and the place where yours may be registered.

Import the module of a class that registers itself, or give its name and path below: a run loads
this file before it looks at the names in its YAML.
"""

from __future__ import annotations

from trinity import NAMES
from trireme.registry import lazy_names

default_mapping: dict[str, str] = {
    # "my_workflow": "trinity.common.workflows.my_workflow.MyWorkflow",
}

__getattr__ = lazy_names(__name__, NAMES[__name__])

"""Config: what the user wrote (Config), what follows from it (Plan), and what is wrong with it.

Its names are imported when they are used: single files of it serve where nothing reads a YAML.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trireme.lazy import lazy_names

if TYPE_CHECKING:
    from trireme.config.load import load_config
    from trireme.config.plan import Plan
    from trireme.config.plans import draft_plans, examine, make_plans
    from trireme.config.problem import ConfigError, Problem
    from trireme.config.schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "Plan",
    "Problem",
    "draft_plans",
    "examine",
    "load_config",
    "make_plans",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Config": "trireme.config.schema",
        "ConfigError": "trireme.config.problem",
        "Plan": "trireme.config.plan",
        "Problem": "trireme.config.problem",
        "draft_plans": "trireme.config.plans",
        "examine": "trireme.config.plans",
        "load_config": "trireme.config.load",
        "make_plans": "trireme.config.plans",
    },
)

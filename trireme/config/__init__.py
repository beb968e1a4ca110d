"""Config: what the user wrote (Config), what follows from it (Plan), and what is wrong with it."""

from __future__ import annotations

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

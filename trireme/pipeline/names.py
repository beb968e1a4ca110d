"""Names: what each operator is called in a YAML, and how a user adds one. Light: loads no part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trireme.registry import Registry

_BUILT_IN = "trireme.pipeline.operators"
OPERATOR_PATHS = {
    "reward_filter": f"{_BUILT_IN}.reward_filter",
    "reward_std_filter": f"{_BUILT_IN}.reward_std_filter",
    "invalid_reward_filter": f"{_BUILT_IN}.invalid_reward_filter",
    "reward_shaping_mapper": f"{_BUILT_IN}.reward_shaping_mapper",
    "pass_rate_calculator": f"{_BUILT_IN}.pass_rate_calculator",
    "deduplication": f"{_BUILT_IN}.deduplication",
    "length_penalty": f"{_BUILT_IN}.length_penalty",
}

OPERATORS = Registry("experience operator", OPERATOR_PATHS)

TASK_OPERATORS = Registry("task operator")
"""All of them are users' own."""


def operator(name: str) -> Callable[[Any], Any]:
    """Decorator: a function `(experiences, *, options)` or an ExperienceOperator, by this name."""
    return OPERATORS.register(name)


def task_operator(name: str) -> Callable[[Any], Any]:
    """Decorator: a function `(rows, *, options) -> rows` by this name."""
    return TASK_OPERATORS.register(name)

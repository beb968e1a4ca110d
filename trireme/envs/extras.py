"""Extras: modules that an environment needs and that a laptop install does not bring."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def extra(module: str, environment: str, group: str = "envs") -> Any:
    """The module. Raises ModuleNotFoundError saying how to install what the environment needs:
    the `group` of extras that brings it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{environment} is not installed: pip install -e '.[{group}]' [{error}]"
        ) from error

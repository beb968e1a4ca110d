"""Extras: modules that an environment needs and that a laptop install does not bring."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def extra(module: str, environment: str, group: str = "envs") -> Any:
    """The module. Raises ModuleNotFoundError saying how to install what the environment needs:
    the `group` of extras that brings it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise _not_installed(environment, group, str(error)) from error


def refuse_missing(needs: Mapping[str, str]) -> None:
    """Raise the same where one of the modules -> environments is not there; nothing is imported."""
    for module, environment in needs.items():
        if find_spec(module) is None:
            raise _not_installed(environment, "envs", f"No module named '{module}'")


def _not_installed(environment: str, group: str, why: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"{environment} is not installed: pip install -e '.[{group}]' [{why}]"
    )

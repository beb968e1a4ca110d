"""Lazy: names of a module that are imported when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562): each name is imported from its module when it is used.

    `names`: name -> `package.module`, or `package.module:other_name`.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        source, _, other = names[name].partition(":")
        return getattr(importlib.import_module(source), other or name)

    return get

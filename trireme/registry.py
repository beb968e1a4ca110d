"""Registry: names that a YAML may use, and what each stands for.

A name is looked up in this order: registered by the user, built in (imported on first use), dotted
path (`package.module.Name` or `my_file:name`). A user's name overrides a built-in and one line says
so; two users' names collide loudly.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from trireme.nearest import did_you_mean

logger = logging.getLogger(__name__)


class Registry:
    """One kind of thing by name: workflows, rewards, algorithms and their parts."""

    def __init__(self, name: str, default_mapping: dict[str, str] | None = None) -> None:
        """`default_mapping` holds the built-in ones: name -> dotted path, imported on first use."""
        self.name = name
        self._built_in = dict(default_mapping or {})
        self._registered: dict[str, Any] = {}
        self._of_paths: dict[str, Any] = {}

    def names(self) -> list[str]:
        """All known names, sorted."""
        return sorted({*self._built_in, *self._registered})

    def get(self, key: str | None) -> Any:
        """What `key` names; None for None. Raises ValueError (unknown) or ImportError (broken)."""
        if key is None:
            return None
        if key in self._registered:
            return self._registered[key]
        path = self._built_in.get(key, key)
        if path is key and "." not in key and ":" not in key:
            raise ValueError(self._unknown(key))
        found = self._of_paths.get(key) or _import_path(path, kind=self.name)
        (self._of_paths if path is key else self._registered)[key] = found  # a path is no name
        return found

    def register_module(
        self,
        module_name: str,
        module_cls: Any = None,
        force: bool = False,
        lazy: bool = False,
    ) -> Any:
        """Register `module_cls` under a name, or use as a decorator.

        `lazy` takes a dotted path that is imported on first use. `force` allows to replace another
        user's entry. Raises ValueError for a name that is taken by another user's entry.
        """
        if module_cls is None:
            return lambda cls: self.register_module(module_name, cls, force, lazy)
        taken = self._registered.get(module_name)
        if taken is not None and module_name not in self._built_in and not force:
            if _same_definition(taken, module_cls):
                return module_cls
            raise ValueError(
                f"{self.name}: the name '{module_name}' is registered twice, "
                f"by {_where(taken)} and by {_where(module_cls)}: rename one"
            )
        if module_name in self._built_in:
            logger.warning(
                "%s: '%s' of %s replaces the built-in one",
                self.name,
                module_name,
                _where(module_cls),
            )
        if lazy and isinstance(module_cls, str):
            self._built_in[module_name] = module_cls
        else:
            self._registered[module_name] = module_cls
        return module_cls

    def adopt(self, other: Registry) -> None:
        """Take over what another registry of the same kind knows."""
        self._built_in.update(other._built_in)
        for name, thing in other._registered.items():
            self.register_module(name, thing)

    def register(self, name: str) -> Callable[[Any], Any]:
        """Decorator form of `register_module`, for our own short decorators."""
        return self.register_module(name)

    def __setitem__(self, name: str, thing: Any) -> None:
        """`registry["name"] = thing`, the way in which some plug-ins register."""
        self.register_module(name, thing)

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._registered

    def _unknown(self, key: str) -> str:
        hint = did_you_mean(key, self.names())
        return f"unknown {self.name} '{key}'{hint} Known: {', '.join(self.names())}"


def _import_path(path: str, *, kind: str) -> Any:
    """The object at `package.module.Name` or `module:name`."""
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if ":" in path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # `my_file:name` of the folder that the run is started in
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(
                f"{kind} '{path}': there is no module '{module_name}' (is its folder on the path, "
                f"or its file in `plugins`?)"
            ) from error
        raise
    if not hasattr(module, attribute):
        names = [n for n in vars(module) if not n.startswith("_")]
        hint = did_you_mean(attribute, names)
        raise ValueError(f"{kind} '{path}': module '{module_name}' has no '{attribute}'{hint}")
    return getattr(module, attribute)


def _same_definition(a: Any, b: Any) -> bool:
    """Whether both come from the same line of the same file (a module that was loaded twice)."""
    return _where(a) == _where(b)


def _where(thing: Any) -> str:
    """`file:name` of a class or function."""
    code = getattr(thing, "__code__", None)
    name = getattr(thing, "__qualname__", repr(thing))
    return f"{code.co_filename if code else getattr(thing, '__module__', '?')}:{name}"

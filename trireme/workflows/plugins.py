"""Plug-ins: loads users' files before a run, so that the YAML can name what they register.

A file is loaded once, as the module of its name: `my_file:name` finds `my_file.py` too.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from trireme.config import ConfigError, Problem
from trireme.config.dialect import dialects
from trireme.config.variables import variable
from trireme.extensions import missing
from trireme.usercode import UserCode, fault_of, with_place

ENTRY_POINTS = "trireme.plugins"


def load_plugins(paths: Iterable[str | Path] = ()) -> list[str]:
    """Load files, folders of `*.py`, the folders in TRIREME_PLUGIN_DIRS and installed packages.

    Returns the names of the modules. Raises ConfigError for the first that fails, with its line.
    """
    for dialect in dialects():
        dialect.stand_in()
    from_environment = variable("PLUGIN_DIRS").split(os.pathsep)
    places = dict.fromkeys(str(path) for path in (*paths, *filter(None, from_environment)))
    loaded = [_load_file(file) for path in places for file in _files(Path(path))]
    for entry in entry_points(group=ENTRY_POINTS):
        guarded(f"package entry point '{entry.name}' ({entry.value})", entry.load)
        loaded.append(entry.value)
    return loaded


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(file for file in path.glob("*.py") if file.name != "__init__.py")
    elif path.is_file():
        yield path
    else:
        raise ConfigError([Problem("plugins", f"has {path}: there is no such file or folder")])


def _load_file(file: Path) -> str:
    file = file.resolve()
    name = file.stem
    there = sys.modules.get(name)
    if there is not None:
        if _origin(there) == file:
            return name
        raise ConfigError(
            [
                Problem(
                    "plugins", f"has {file}: a module '{name}' is loaded already, rename the file"
                )
            ]
        )
    for folder in (str(file.parent), os.getcwd()):  # its imports are in either
        if folder not in sys.path:
            sys.path.append(folder)
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError([Problem("plugins", f"has {file}: expected a Python file (.py)")])
    module = module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    try:
        guarded(str(file), lambda: loader.exec_module(module))
    except ConfigError:
        del sys.modules[name]
        raise
    importlib.invalidate_caches()
    return name


def _origin(module: ModuleType) -> Path | None:
    path = getattr(module, "__file__", None)
    return Path(path).resolve() if path else None


def guarded(what: str, load: object) -> None:
    """Run user code; an exception becomes one sentence with the line that raised it."""
    assert callable(load)
    try:
        with UserCode(what):
            load()
    except Exception as error:
        fault = fault_of(error, what)
        assert fault is not None
        text = f"has {what}, which fails to load: {fault.text}{_explained(error)}"
        raise ConfigError([Problem("plugins", with_place(text, fault.place))]) from error


def _explained(error: Exception) -> str:
    """Explain the import of another system's name, to follow its error."""
    name = error.name if isinstance(error, ImportError) else None
    package = (name or "").partition(".")[0]
    if need := missing("dialect", package):
        return f" ({package} {need})"
    loader: Any = getattr(sys.modules.get(package), "__loader__", None)
    return loader.explain(error) if hasattr(loader, "explain") else ""

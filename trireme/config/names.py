"""Names: whether a workflow, reward or algorithm that the YAML names exists, without importing it.

A name is known when it is built in, registered (plug-ins are loaded before this is asked), or the
path of something in a module that can be found.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from trireme.config.stages import Stage
from trireme.nearest import did_you_mean

_REGISTRIES = {
    "workflow": ("trireme.workflows.names", "WORKFLOWS"),
    "reward": ("trireme.rewards.names", "REWARDS"),
    "algorithm": ("trireme.algorithms.names", "ALGORITHMS"),
    "advantage": ("trireme.algorithms.names", "ADVANTAGES"),
    "policy loss": ("trireme.algorithms.names", "POLICY_LOSSES"),
    "KL": ("trireme.algorithms.names", "KLS"),
    "entropy": ("trireme.algorithms.names", "ENTROPIES"),
    "sample strategy": ("trireme.algorithms.names", "SAMPLES"),
    "multi-turn scheduler": ("trireme.workflows.names", "MULTI_TURNS"),
    "reward function": ("trireme.rewards.names", "ORMS"),
    "experience operator": ("trireme.pipeline.names", "OPERATORS"),
    "task operator": ("trireme.pipeline.names", "TASK_OPERATORS"),
    "data selector": ("trireme.data.selectors", "SELECTORS"),
}
"""Kind of name -> the module and the registry that know the names of that kind."""


def known_names(kind: str) -> list[str]:
    """Built-in names, and those that are registered in this process, sorted."""
    module, registry = _REGISTRIES[kind]
    # Imported here: these modules are light, but they lie above config.
    return getattr(importlib.import_module(module), registry).names()


def check_name(stage: Stage, kind: str, name: str, key: str, *, or_kind: str = "") -> None:
    """Notes a problem where `name` is nothing of this kind, or the other, that can be found."""
    known, plugins = known_names(kind), stage.config.plugins
    if or_kind:
        known = sorted({*known, *known_names(or_kind)})
    if name in known or not stage.plugins_loaded:
        return
    if ":" in name or "." in name:
        module = name.partition(":")[0] if ":" in name else name.rpartition(".")[0]
        top = module.partition(".")[0]
        if not _is_there(top, plugins):
            stage.problem(
                key,
                f"is {name!r}: expected the {kind} of a module that can be found, and there is no "
                f"'{top}' (is its file in `plugins`?)",
            )
        return
    listed = ", ".join(known)
    hint = did_you_mean(name, known, "did you mean '{}'? ")
    stage.problem(key, f"is {name!r}, an unknown {kind}: {hint}Known: {listed}")


def plugin_files(plugins: Sequence[str]) -> list[Path]:
    """The Python files of `plugins` and of the folders in TRINITY_PLUGIN_DIRS."""
    places = [*plugins, *filter(None, os.environ.get("TRINITY_PLUGIN_DIRS", "").split(os.pathsep))]
    out: list[Path] = []
    for place in map(Path, places):
        out.extend(sorted(place.glob("*.py")) if place.is_dir() else [place])
    return out


def _is_there(module: str, plugins: Sequence[str]) -> bool:
    """Whether the file or package of a top-level module can be found."""
    files = plugin_files(plugins)
    folders = [*sys.path, os.getcwd(), *{str(path.parent) for path in files}]
    return (
        module in {path.stem for path in files}
        or module in sys.modules
        or PathFinder.find_spec(module, folders) is not None
    )

"""`trireme algorithms`, `workflows` and `extensions`: lists the names for a YAML, plug-ins
included.

The tables suit a terminal and `grep`: each algorithm with its parts, and the choices for each part,
by formula; each workflow and reward with the first line of its docstring; each extension with its
requirements, by its manifest.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trireme.registry import did_you_mean
from trireme.text import say


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line per row, the columns padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the table, and an empty line after it."""
    say(*in_columns([headings, *rows]), "", sep="\n")


def first_line(thing: Any) -> str:
    """Return the first line of a thing's docstring, or nothing."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def plugins_loaded(plugin_dirs: Sequence[Path]) -> bool:
    """Load all plug-ins, so that they are listed too; if one fails, say why and return False."""
    from trireme.cli.run import add_plugin_dirs, complain
    from trireme.workflows.plugins import load_plugins

    try:
        add_plugin_dirs(plugin_dirs)
        load_plugins()
    except ValueError as error:
        complain(str(error))
        return False
    return True


def workflows(plugin_dirs: Sequence[Path]) -> int:
    """Print two tables; returns the exit code."""
    from trireme.registry import REWARDS, WORKFLOWS

    if not plugins_loaded(plugin_dirs):
        return 2
    for heading, registry in (("workflow", WORKFLOWS), ("reward", REWARDS)):
        rows = [(name, first_line(registry.get(name))) for name in registry.names()]
        print_table((heading, "what it does"), rows)
    return 0


def algorithms(plugin_dirs: Sequence[Path] = (), chosen: Sequence[str] = ()) -> int:
    """Print three tables, of the `chosen` algorithms or of all; returns the exit code."""
    from trireme.algorithms.part import PARTS
    from trireme.algorithms.recipes import Recipe
    from trireme.registry import ALGORITHMS

    if not plugins_loaded(plugin_dirs):
        return 2
    for name in chosen:
        if name not in ALGORITHMS.names():
            from trireme.cli.run import complain

            complain(f"there is no algorithm '{name}'{did_you_mean(name, ALGORITHMS.names())}")
            return 2
    rows, uses = [], []
    for name in chosen or ALGORITHMS.names():
        recipe = ALGORITHMS.get(name)
        if not isinstance(recipe, Recipe):
            continue  # a path that names something else: refused on use
        needs = [
            word
            for word, needed in (
                ("critic", recipe.needs_critic),
                ("reference", recipe.needs_reference),
                ("data set", recipe.from_data),
            )
            if needed
        ]
        parts = (recipe.advantage_fn or "none", recipe.policy_loss_fn, recipe.kl_loss_fn,
                 recipe.entropy_loss_fn, recipe.loss_agg_mode, ", ".join(needs))  # fmt: skip
        rows.append((name, *parts))
        uses.append((name, recipe.use))
    columns = ("algorithm_type", "advantage_fn", "policy_loss_fn", "kl_loss_fn", "entropy_loss_fn",
               "loss_agg_mode", "needs")  # fmt: skip
    print_table(columns, rows)
    print_table(("algorithm_type", "when to use it"), uses)
    used = {pair for row in rows for pair in zip(columns, row, strict=True)}
    formulas = []
    for registry in dict.fromkeys(PARTS.values()):
        key = registry.name.removeprefix("algorithm.")
        names = [name for name in registry.names() if not chosen or (key, name) in used]
        formulas += [(key, name, first_line(registry.get(name))) for name in names]
    print_table(("key", "name", "formula"), formulas)
    return 0


def extensions() -> int:
    """Print three tables; returns the exit code."""
    from trireme.extensions import extensions as found

    if not found():
        say("no extension is installed")
        return 0
    print_table(("extension", "what it is"), [(e.name, e.about) for e in found().values()])
    needs = [(e.name, need, _version(need) or "no") for e in found().values() for need in e.needs]
    needs += [
        (e.name, f"extension {other}", "yes" if other in found() else "no")
        for e in found().values()
        for other in e.uses
    ]
    if needs:
        print_table(("extension", "needs", "installed"), needs)
    print_table(
        ("extension", "kind", "name"),
        [
            (e.name, kind, name)
            for e in found().values()
            for kind, names in e.names.items()
            for name in names
        ],
    )
    return 0


def _version(package: str) -> str:
    """Return the installed version of a package; empty if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

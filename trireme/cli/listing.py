"""Listing: names with what they stand for, as a plain table that a terminal or `grep` can read."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns padded to their widest cell, an empty line after the last row."""
    table = [headings, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(headings))]
    for row in table:
        print("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())
    print()


def first_line(thing: Any) -> str:
    """The first line of its docstring, or nothing."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def plugins_loaded(plugin_dirs: Sequence[Path]) -> bool:
    """Whether all plug-ins could be loaded, so that they are listed too; else says why not."""
    from trireme.cli.run import add_plugin_dirs, complain
    from trireme.workflows.plugins import load_plugins

    try:
        add_plugin_dirs(plugin_dirs)
        load_plugins()
    except ValueError as error:
        complain(str(error))
        return False
    return True

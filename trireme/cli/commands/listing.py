"""The commands that list what there is: `trireme algorithms`, `workflows` and `extensions`."""

from __future__ import annotations

from typing import Annotated

import typer

from trireme.cli.arguments import PluginDirs


def algorithms(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Only these algorithms.")
    ] = None,
    plugin_dir: PluginDirs = None,
) -> None:
    """List the algorithms and their parts; --plugin-dir adds yours."""
    from trireme.cli.listing import algorithms as command

    raise typer.Exit(command(plugin_dir or [], names or []))


def workflows(plugin_dir: PluginDirs = None) -> None:
    """List the workflows and rewards; --plugin-dir adds yours."""
    from trireme.cli.listing import workflows as command

    raise typer.Exit(command(plugin_dir or []))


def extensions() -> None:
    """List the extensions, with what each needs and adds."""
    from trireme.cli.listing import extensions as command

    raise typer.Exit(command())

"""The command `trireme init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")] = Path("my_project"),
) -> None:
    """Write a starter project that runs as it is.

    It has a workflow, a reward, a YAML, data, a test and a tiny model.
    """
    from trireme.cli.init import init as command

    raise typer.Exit(command(folder))

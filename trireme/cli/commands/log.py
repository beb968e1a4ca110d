"""The command `trireme log`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trireme.log import LEVELS


def log(
    folder: Annotated[
        Path | None, typer.Argument(help="The job's folder, as by --log-dir.", show_default=False)
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", "-d", help="The job's folder, or its log folder.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The YAML of the run, instead of --log-dir."),
    ] = None,
    keyword: Annotated[
        str, typer.Option("--keyword", "-k", help="Only lines with this text.")
    ] = "",
    level: Annotated[
        str, typer.Option("--level", "-l", help=f"The lowest level: {', '.join(LEVELS)}.")
    ] = "DEBUG",
    last: Annotated[int, typer.Option("--last", "-n", help="Only the last N lines; 0: all.")] = 0,
    pattern: Annotated[
        str, typer.Option("--pattern", "-p", help="The files to read, such as 'explorer*'.")
    ] = "*",
    no_color: Annotated[bool, typer.Option("--no-color", help="Plain text.")] = False,
) -> None:
    """Show the logs of a run's parts in order of time."""
    from trireme.cli.log import log as command

    if folder is not None and log_dir is not None:
        raise typer.BadParameter(f"{folder} and --log-dir {log_dir}: expected one of them")
    raise typer.Exit(
        command(folder or log_dir, config, keyword=keyword, level=level, last=last, pattern=pattern,
                color=not no_color)
    )  # fmt: skip

"""The command `trireme chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def chat(
    place: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of a run, a checkpoint or a model.")
    ],
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="The sampling temperature; 0 is greedy.")
    ] = 0.0,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="The maximum number of tokens in a reply.")
    ] = 512,
) -> None:
    """Chat with a trained model in the terminal."""
    from trireme.ext.evaluation.chat import chat as command

    raise typer.Exit(command(place, system=system, temperature=temperature, max_tokens=max_tokens))

"""Options: those of `trireme eval`, each with its default and its help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from trireme.cli.arguments import PluginDirs, Words


@dataclass(frozen=True)
class EvalOptions:
    """The command's options."""

    models: Annotated[
        list[str],
        typer.Option(
            "--model",
            "-m",
            help="The folder of a model, a run or a checkpoint, an id, a rollout server's address, "
            "or NAME@URL for an OpenAI API; may be repeated.",
        ),
    ]
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="A YAML with eval_tasksets, instead of --tasks."),
    ] = None
    keys: Sequence[str] = ()
    """The keys among the words of the command."""
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks", help="A data set, PATH or NAME=PATH, instead of a YAML; may be repeated."
        ),
    ] = None
    workflow: Annotated[
        str | None, typer.Option(help="The workflow of --tasks; by default math_workflow.")
    ] = None
    reward: Annotated[
        str | None, typer.Option(help="The reward of --tasks; by default the workflow's.")
    ] = None
    prompt_key: Annotated[
        str | None,
        typer.Option(
            "--prompt-key",
            help="The column of --tasks with the prompt; by default the first row shows it.",
        ),
    ] = None
    response_key: Annotated[
        str | None,
        typer.Option(
            "--response-key",
            help="The column of --tasks with the reference answer, found likewise; '' if there is "
            "none.",
        ),
    ] = None
    rollouts: Annotated[
        int | None,
        typer.Option(
            "--rollouts",
            "-n",
            min=1,
            help="Rollouts per task; by default the taskset's repeat_times.",
        ),
    ] = None
    ks: Annotated[
        list[int] | None,
        typer.Option(
            "--k",
            "-k",
            min=1,
            help="The k of pass@k; may be repeated. By default 1 and the number of rollouts.",
        ),
    ] = None
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None
    success: Annotated[float, typer.Option(help="The smallest value that counts as a pass.")] = 1.0
    out: Annotated[
        Path | None, typer.Option(help="A JSON file for the value of every rollout.")
    ] = None
    plugin_dir: PluginDirs = None
    words: Words = None

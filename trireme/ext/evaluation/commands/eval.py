"""The command `trireme eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trireme.cli.arguments import PluginDirs, Words, yaml_and_keys

EvalConfig = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="A YAML with eval_tasksets, in place of --tasks."),
]
TaskFiles = Annotated[
    list[str] | None,
    typer.Option("--tasks", help="A data set to try, PATH or NAME=PATH; instead of a YAML."),
]
Ks = Annotated[
    list[int] | None,
    typer.Option("--k", "-k", min=1, help="The k of pass@k; by default 1 and the rollouts."),
]


def eval_command(
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            "-m",
            help="The folder of a model, a run or a checkpoint, an id, a rollout server's address, "
            "or NAME@URL for an OpenAI API; may be repeated.",
        ),
    ],
    words: Words = None,
    config: EvalConfig = None,
    tasks: TaskFiles = None,
    workflow: Annotated[str | None, typer.Option(help="With --tasks.")] = None,
    reward: Annotated[str | None, typer.Option(help="With --tasks.")] = None,
    prompt_key: Annotated[str, typer.Option("--prompt-key", help="With --tasks.")] = "question",
    response_key: Annotated[str, typer.Option("--response-key", help="With --tasks.")] = "answer",
    rollouts: Annotated[
        int | None,
        typer.Option("--rollouts", "-n", min=1, help="Of each task; by default the YAML's."),
    ] = None,
    k: Ks = None,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    success: Annotated[float, typer.Option(help="The least value that passes.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="A JSON file.")] = None,
    plugin_dir: PluginDirs = None,
) -> None:
    """Measure models on task sets, and compare them.

    It prints means and pass@k with intervals of 95 % confidence, and of several models the
    difference of each to the first over the same tasks.
    """
    from trireme.cli.run import add_plugin_dirs
    from trireme.ext.evaluation.evaluate import EvalOptions, evaluate_models

    config, keys = yaml_and_keys(config, words, {})
    if (config is None) == (not tasks):
        raise typer.BadParameter("expected a YAML with eval_tasksets, or --tasks, and not both")
    add_plugin_dirs(plugin_dir or [])
    options = EvalOptions(
        model, config, keys, tasks or (), workflow, reward, prompt_key, response_key,
        rollouts, k or (), temperature, max_tokens, success, out,
    )  # fmt: skip
    raise typer.Exit(evaluate_models(options))

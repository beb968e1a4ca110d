"""The command `trireme eval`."""

from __future__ import annotations

from dataclasses import replace

import typer

from trireme.cli.arguments import with_options, yaml_and_keys
from trireme.ext.evaluation.options import EvalOptions


@with_options(EvalOptions)
def eval_command(ctx: typer.Context, options: EvalOptions) -> None:
    """Measure models on task sets, and compare them.

    It prints means and pass@k with intervals of 95 % confidence, and of several models the
    difference of each to the first over the same tasks.
    """
    from trireme.cli.run import add_plugin_dirs
    from trireme.ext.evaluation.evaluate import evaluate_models

    config, keys = yaml_and_keys(options.config, options.words, {})
    if (config is None) == (not options.tasks):
        raise typer.BadParameter("expected a YAML with eval_tasksets, or --tasks, and not both")
    add_plugin_dirs(options.plugin_dir or [])
    raise typer.Exit(evaluate_models(replace(options, config=config, keys=keys)))

"""The command `trireme eval`."""

from __future__ import annotations

from dataclasses import replace

import typer

from trireme.cli.arguments import WithFlags, with_options, yaml_and_keys
from trireme.ext.evaluation.options import EvalOptions

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=WithFlags)
@with_options(EvalOptions)
def eval_command(ctx: typer.Context, options: EvalOptions) -> None:
    """Measure models on task sets, and compare them.

    It prints means and pass@k with intervals of 95 % confidence, and of several models the
    difference of each to the first over the same tasks.
    """
    from trireme.cli.run import add_plugin_dirs
    from trireme.ext.evaluation.evaluate import evaluate_models

    if options.tasks and ctx.obj:
        raise typer.BadParameter(
            f"--{next(iter(ctx.obj))} sets keys of a YAML: expected one in place of --tasks, or "
            "KEY=VALUE in place of the flag"
        )
    config, keys = yaml_and_keys(options.config, options.words, ctx.obj)
    if (config is None) == (not options.tasks):
        raise typer.BadParameter("expected a YAML with eval_tasksets, or --tasks, and not both")
    add_plugin_dirs(options.plugin_dir or [])
    raise typer.Exit(evaluate_models(replace(options, config=config, keys=keys), ctx.obj))

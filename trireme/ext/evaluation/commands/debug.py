"""The command `trireme debug`."""

from __future__ import annotations

from typing import Annotated

import typer

from trireme.cli.arguments import OptionalConfig, PluginDirs, WithFlags, Words, yaml_and_keys

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=WithFlags)
def debug(
    ctx: typer.Context,
    words: Words = None,
    config: OptionalConfig = None,
    task: Annotated[int, typer.Option(min=0, help="The row of the taskset.")] = 0,
    rollouts: Annotated[int, typer.Option(min=1, help="The number of rollouts.")] = 1,
    reply: Annotated[
        list[str] | None,
        typer.Option(
            "--reply",
            help="A reply to use in place of the model's; one per call. No weights are loaded.",
        ),
    ] = None,
    plugin_dir: PluginDirs = None,
) -> None:
    """Run one task, and print each token and whether it is trained."""
    from trireme.ext.evaluation.debug import debug as command

    config, keys = yaml_and_keys(config, words, ctx.obj)
    if config is None:
        raise typer.BadParameter("expected a YAML: trireme debug my.yaml")
    options = {"task": task, "rollouts": rollouts, "replies": reply or []}
    raise typer.Exit(command(config, keys, plugin_dir or [], **options))

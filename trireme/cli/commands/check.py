"""The command `trireme check`."""

from __future__ import annotations

import typer

from trireme.cli.arguments import (
    OptionalConfig,
    PluginDirs,
    Strict,
    WithFlags,
    Words,
    yaml_and_keys,
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=WithFlags)
def check(
    ctx: typer.Context,
    words: Words = None,
    config: OptionalConfig = None,
    plugin_dir: PluginDirs = None,
    strict: Strict = False,
) -> None:
    """Print a YAML's derived values and problems; start nothing."""
    from trireme.cli.check import check as command
    from trireme.cli.run import add_plugin_dirs

    config, keys = yaml_and_keys(config, words, ctx.obj)
    if config is None:
        raise typer.BadParameter("expected a YAML: trireme check my.yaml")
    add_plugin_dirs(plugin_dir or [])
    raise typer.Exit(command(config, keys, strict=strict, flags=ctx.obj))

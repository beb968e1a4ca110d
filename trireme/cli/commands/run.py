"""The command `trireme run`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from trireme.cli.arguments import (
    OptionalConfig,
    PluginDirs,
    Strict,
    WithFlags,
    Words,
    yaml_and_keys,
)
from trireme.cli.makers import in_full
from trireme.text import say

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=WithFlags)
def run(
    ctx: typer.Context,
    words: Words = None,
    config: OptionalConfig = None,
    plugin_dir: PluginDirs = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Afterwards, spend RL's time on more SFT and compare.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin a new run, NAME_2, in place of resuming NAME.")
    ] = False,
    strict: Strict = False,
) -> None:
    """Run an experiment, or the built-in demo."""
    import trireme

    config, keys = yaml_and_keys(config, words, ctx.obj)
    # before the other imports, which take seconds
    what = config or "the demo: a tiny model learns word problems, on this machine's cores"
    waits = "loading torch, and checking model, data and workflows"
    say(f"trireme {trireme.__version__}: {what}; {waits}", flush=True)
    from trireme.cli.run import run as command

    code = command(
        *(config, keys, plugin_dir or []),
        compare=compare,
        fresh=fresh,
        strict=strict,
        named=partial(in_full, config=config, flags=ctx.obj),
    )
    raise typer.Exit(code)

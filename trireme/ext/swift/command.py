"""The command `trireme rlhf`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import typer

from trireme.cli.arguments import Keys, PluginDirs, WithFlags, is_yaml, with_flags
from trireme.text import say

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class WithAllFlags(WithFlags):
    """The command's flags are all there is to its configuration."""

    def own_flags(self) -> Sequence[str]:
        """The flags that only this command has."""
        from trireme.ext.swift.rlhf import OWN_FLAGS

        return OWN_FLAGS


@app.command(cls=WithAllFlags)
def rlhf(ctx: typer.Context, words: Keys = None, plugin_dir: PluginDirs = None) -> None:
    """Run GRPO, DPO or KTO from ms-swift's flags; print the YAML they stand for."""
    from trireme.cli.run import complain
    from trireme.cli.run import run as command
    from trireme.config import ConfigError
    from trireme.ext.swift.rlhf import yaml_of
    from trireme.files import CannotWrite

    for word in words or ():
        if "=" not in word:
            also = f"; a YAML is run by `trireme run {word}`" if is_yaml(word) else ""
            raise typer.BadParameter(f"{word}: expected KEY=VALUE, or a flag before it{also}")
    try:
        path = yaml_of(ctx.obj, words or [])
    except (ConfigError, CannotWrite) as error:
        complain(str(error))
        raise typer.Exit(2) from error
    say(f"# {path}: the same run is `trireme run {path}`", flush=True)
    named = partial(with_flags, flags=ctx.obj)
    raise typer.Exit(command(path, [], plugin_dir or [], heading=path.read_text(), named=named))

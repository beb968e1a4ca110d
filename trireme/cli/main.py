"""Command line: finds the commands by their names in manifests, and runs the one that is chosen.

A command is a function with typer's annotations, or of one dataclass with them (`with_options`), or
a typer app. Its module is imported to list it by the first sentence of its docstring, so what it
runs is imported when it is called. cyclopts and tyro take dataclasses without `with_options`, but
the smallest command's `--help` takes 0.71 s and 0.38 s with them, 0.29 s with typer, and both write
errors and help otherwise.
"""

from __future__ import annotations

import errno
import gc
import inspect
import io
import logging
import sys
import traceback
from typing import Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from trireme.cli.arguments import is_yaml
from trireme.extensions import missing
from trireme.launch import GC_THRESHOLDS, before_exit
from trireme.log import Lines
from trireme.registry import COMMANDS, did_you_mean
from trireme.text import say


class Commands(TyperGroup):
    """The group of all commands: each is made when it is chosen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = cast(Any, dict.fromkeys(COMMANDS))  # the names, in their order

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command by this name; None if there is none."""
        if cmd_name not in COMMANDS:
            if need := missing("command", cmd_name):
                ctx.fail(f"The command {cmd_name} {need}.")
            if (hint := _meant(cmd_name)) and not ctx.resilient_parsing:
                ctx.fail(f"No such command '{cmd_name}'{hint}")
            return None
        command = typer.main.get_command(_app_of(cmd_name))
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands by their first sentences, without making their parsers, which takes a
        fifth of the time.
        """
        width = formatter.width - 6 - max(map(len, COMMANDS))
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, TyperCommand(name, help=_help_of(name)).get_short_help_str(width))
                    for name in COMMANDS
                ]
            )


_OTHERS = {"train": "run", "start": "run", "resume": "run", "serve": "rollout", "ls": "list"}
"""What other programs call our commands."""


def _meant(name: str) -> str:
    """Suggest our command for another program's, or `run` for a YAML; '' if nothing is near, and
    for a misspelling of ours, to which typer adds the nearest.
    """
    if is_yaml(name):
        return f". Did you mean 'trireme run {name}'?"
    if did_you_mean(name, COMMANDS):
        return ""
    other = _OTHERS.get(did_you_mean(name, _OTHERS, "{}"))
    return f". Did you mean '{other}'?" if other in COMMANDS else ""


def _app_of(name: str) -> typer.Typer:
    """Make the app of a command. If an extension's is broken, the others still work."""
    try:
        made = COMMANDS.get(name)
    except Exception as error:
        why = f"The command {name} cannot be imported ({error!r})"
        made = _plain_app()

        @made.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
        def broken() -> None:
            raise typer.BadParameter(f"{why}; `trireme extensions` lists what each extension needs")

        broken.__doc__ = f"{why}."
    if not isinstance(made, typer.Typer):
        function, made = made, _plain_app()
        made.command()(function)
    return made


def _plain_app() -> typer.Typer:
    return typer.Typer(add_completion=False, rich_markup_mode=None)


def _help_of(name: str) -> str:
    """Return the help of an app, or the docstring of its only command."""
    made = _app_of(name)
    if isinstance(made.info.help, str):
        return made.info.help
    return inspect.getdoc(made.registered_commands[0].callback) or ""


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        import trireme

        typer.echo(f"trireme {trireme.__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Fine-tune language models by reinforcement learning from agents' experience."""


def main() -> None:
    """Run the command line and end the process: the entry point of both of its names."""
    try:
        command_line()
    except SystemExit as end:
        # a command that runs nothing has not imported it
        if stop := cast(Any, sys.modules.get("trireme.launch.stop")):
            stop.leave_at_once(end.code if isinstance(end.code, int) else int(bool(end.code)))
        raise


def command_line() -> None:
    """Run the command that the program's arguments name. Raises SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character must not end a run of hours
    # What a command imports are so many objects that looking at all of them, several times, would
    # take a sixth of the time of `check`.
    gc.set_threshold(*GC_THRESHOLDS)
    if logging.lastResort is not None:  # libraries' log lines that our files do not get
        logging.lastResort.setFormatter(Lines())
    try:
        app()
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            path = str(error.filename)
            say(f"error: {path}: expected names of at most 255 bytes", file=sys.stderr)
            sys.exit(2)
        say(traceback.format_exc(), end="", file=sys.stderr)  # an error of ours
        sys.exit(1)
    finally:
        before_exit()

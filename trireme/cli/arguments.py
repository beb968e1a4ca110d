"""Arguments: the options that several commands have, and the words and flags of a configuration.

What flags mean is imported when a command that takes them is called: `--help` lists without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[YAML] [KEY=VALUE]...",
        help="The run's YAML, and keys to override, such as trainer.grad_clip=0.5.",
    ),
]
Keys = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the YAML to override.")
]
PluginDirs = Annotated[
    list[Path] | None,
    typer.Option("--plugin-dir", help="A folder of *.py files to load first; may be repeated."),
]
OptionalConfig = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The YAML of the run; without it, the built-in demo."),
]
FLAGS_HELP = (
    "ms-swift's flags work too: --multi_turn_scheduler, --max_turns, --loss_scale, "
    "--reward_funcs A B, --external_plugins FILE, --vllm_server_base_url URL and others: "
    "docs/ms_swift.md"
)


class WithFlags(TyperCommand):
    """A command that also takes the flags; they are in its context's `obj`."""

    def own_flags(self) -> Sequence[str]:
        """Flags of this command alone, each with any number of values."""
        return ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the flags out, and what stands behind an option that may be repeated as its own."""
        from trireme.cli.flag_names import KEYS, TASKSETS, TRANSLATED, elsewhere

        own = self.own_flags()
        options = {name.lstrip("-"): p for p in self.params for name in p.opts}
        ctx.obj, rest = _taken(args, options, own)
        for index, word in enumerate(rest):
            name, _, value = word.removeprefix("--").partition("=")
            if not word.startswith("--") or name in options:
                continue
            if instead := elsewhere(name):
                raise typer.BadParameter(f"no such option: --{name}. Set {instead}")
            if "." in name:
                value = value or next(iter(rest[index + 1 :]), "VALUE")
                raise typer.BadParameter(
                    f"no such option: --{name}. Keys of the YAML are set as KEY=VALUE: "
                    f"{name}={value}"
                )
            flags = {*options, *KEYS, *TASKSETS, *TRANSLATED, *own}
            if near := get_close_matches(name, flags, n=1, cutoff=0.75):
                raise typer.BadParameter(f"no such option: --{name}; did you mean --{near[0]}?")
        return super().parse_args(ctx, rest)


def _taken(
    args: Sequence[str], options: Mapping[str, Any], own_flags: Sequence[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """The flags with their values, and all other words; `own_flags` are a command's own."""
    from trireme.cli.flag_names import IDLE, KEYS, SEVERAL, TASKSETS, TRANSLATED

    chosen: dict[str, list[str]] = {}
    rest: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        mine = word.startswith("--") and name not in options
        tables = (KEYS, TASKSETS, IDLE, TRANSLATED, own_flags)
        known = mine and any(name in table for table in tables)
        several = (
            name in (*SEVERAL, *own_flags) if known else getattr(options.get(name), "multiple", 0)
        )
        if not known and not (several and word.startswith("--")):
            rest.append(word)
            continue
        values = [value] if equals else words[:1]
        del words[: 0 if equals else 1]
        while several and words and not _is_other(words[0]):
            values.append(words.pop(0))
        if known and not values:
            raise typer.BadParameter(f"--{name} needs a value")
        if known:
            chosen[name] = [*chosen.get(name, []), *values] if several else values
        else:
            rest += [part for one in values for part in (f"--{name}", one)]
    return chosen, rest


def _is_other(word: str) -> bool:
    """Whether a word behind several values is not one more of them."""
    return word.startswith("-") or "=" in word or is_yaml(word)


def is_yaml(word: str) -> bool:
    """Whether a plain word names a configuration."""
    return word.endswith((".yaml", ".yml")) and "=" not in word


def yaml_and_keys(
    config: Path | None, words: Sequence[str] | None, flags: Mapping[str, list[str]] | None
) -> tuple[Path | None, list[str]]:
    """The configuration, which may be a plain word, and the keys to set, those of flags first.

    Raises BadParameter for other words.
    """
    from trireme.cli.flags import overrides

    keys: list[str] = []
    for word in words or ():
        if is_yaml(word) and config is None:
            config = Path(word)
        elif "=" in word and not is_yaml(word):
            keys.append(word)
        else:
            also = f"; the YAML is {config} already" if is_yaml(word) else ", or a YAML (*.yaml)"
            raise typer.BadParameter(f"{word}: expected KEY=VALUE{also}")
    return config, [*overrides(flags or {}, config), *keys]

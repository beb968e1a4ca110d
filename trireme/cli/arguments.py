"""Arguments: the options that several commands have, and the words and flags of a configuration.

The meaning of flags is imported when a command that takes them is called: `--help` works without
it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from trireme.config import Problem
from trireme.config.dialect import deleting, replaced
from trireme.extensions import absent
from trireme.registry import FLAGS

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

Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse another engine or device than the YAML asks for."),
]

Given = Mapping[str, list[str]]
"""Maps a flag, without its dashes, to its values."""
Source = Path | Mapping[str, Any] | None
"""A configuration: its file, the values of a file, or None: the demo's."""

T = TypeVar("T")


class FlagDialect(Protocol):
    """Another system's flags, by its name in FLAGS; made without arguments."""

    about: str
    """The sentence about them in `--help`."""
    names: Collection[str]
    """Flags that set keys, without their dashes."""
    idle: Mapping[str, str]
    """Flags that are accepted and change nothing, each with the reason."""
    several: Collection[str]
    """Flags with several values."""
    switches: Collection[str]
    """Flags that need no value: alone they stand for `true`."""

    def instead(self, name: str) -> str | None:
        """Suggest what to set in place of a flag of that system which is not taken here; None:
        unknown.
        """
        ...

    def sets(self, name: str, key: str) -> bool:
        """Return whether the flag sets the key of the YAML."""
        ...

    def overrides(self, flags: Given, config: Source) -> list[str]:
        """Return `key=value` for flags of a command. Raises BadParameter for invalid ones."""
        ...


def flag_dialects() -> list[FlagDialect]:
    """Return all dialects of flags, in the order of their names. One that cannot be made is left
    out with a warning.
    """
    return [*FLAGS.make_all().values()]


def with_flags(problems: Iterable[Problem], flags: Given | None) -> list[Problem]:
    """Name the flag, if one was given, that has set the key of each problem."""
    out = []
    for problem in problems:
        names = (
            name
            for one in flag_dialects() * bool(flags)
            for key in _keys_in(problem)
            for name in flags or ()
            if one.sets(name, key)
        )
        if flag := next(names, None):
            start = f"--{flag}: {problem.key}"
            problem = replace(problem, key=start if problem.key else start.rstrip())
        out.append(problem)
    return out


def _keys_in(problem: Problem) -> list[str]:
    """Return the key of a problem; if it has none, those that its sentence names."""
    if problem.key:
        return [problem.key]
    options = re.findall(r"(algorithm\.\w+) '[^']+': (\w+) is", problem.text)
    return [f"{part}_args.{name}" for part, name in options] or re.findall(
        r"[a-z_]+(?:\.[a-z_]+)+", problem.text
    )


def with_options(
    options: type[T],
) -> Callable[[Callable[[typer.Context, T], None]], Callable[..., None]]:
    """Decorator: the function `(ctx, options)` as a command that has the options of a dataclass,
    those of its fields that are annotated with typer's.
    """
    kinds = get_type_hints(options, include_extras=True)
    made: Any = inspect.signature(options)
    parameters = [
        p.replace(kind=p.KEYWORD_ONLY, annotation=kinds[p.name])
        for p in made.parameters.values()
        if get_origin(kinds[p.name]) is Annotated
    ]

    def mark(function: Callable[[typer.Context, T], None]) -> Callable[..., None]:
        @wraps(function)
        def command(ctx: typer.Context, **given: Any) -> None:
            function(ctx, options(**given))

        ctx = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        command.__dict__["__signature__"] = inspect.Signature([ctx, *parameters])
        command.__annotations__ = {p.name: p.annotation for p in [ctx, *parameters]}
        return command

    return mark


class WithFlags(TyperCommand):
    """A command that also takes other systems' flags; they are in its context's `obj`."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Print which flags also work."""
        self.epilog = "\n\n".join(dialect.about for dialect in flag_dialects())
        super().format_epilog(ctx, formatter)

    def own_flags(self) -> Sequence[str]:
        """The flags of this command alone, each with any number of values."""
        return ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove other systems' flags, and split `--option A B` into `--option A --option B`."""
        own, dialects = self.own_flags(), flag_dialects()
        options = {name.lstrip("-"): p for p in self.params for name in p.opts}
        ctx.obj, rest = _taken(args, options, own, dialects)
        away = ", ".join(sorted({*absent("flags").values()}))
        for index, word in enumerate(rest):
            name, _, value = word.removeprefix("--").partition("=")
            before = options.get(rest[index - 1].removeprefix("--")) if index else None
            if getattr(before, "multiple", False):  # the value of `--option`
                continue
            if not word.startswith("--") or name in options or word in ctx.help_option_names:
                continue
            if instead := next(filter(None, (one.instead(name) for one in dialects)), None):
                raise typer.BadParameter(f"no such option: --{name}. Set {instead}")
            if "." in name:
                if hint := replaced(name.replace("-", "_")):
                    raise typer.BadParameter(
                        f"no such option: --{name}. Keys of the YAML are set as KEY=VALUE; {hint}"
                    )
                value = value or next(iter(rest[index + 1 :]), "VALUE")
                raise typer.BadParameter(
                    f"no such option: --{name}. Keys of the YAML are set as KEY=VALUE: "
                    f"{name}={value}"
                )
            flags = {*options, *(flag for one in dialects for flag in one.names), *own}
            if near := get_close_matches(name, flags, n=1, cutoff=0.75):
                raise typer.BadParameter(f"no such option: --{name}; did you mean --{near[0]}?")
            if away:
                raise typer.BadParameter(
                    f"no such option: --{name}. Other systems' flags need an extension that is not "
                    f"here: {away}"
                )
            raise typer.BadParameter(
                f"no such option: --{name}. Keys of the YAML are set as KEY=VALUE, such as "
                "algorithm.optimizer.lr=1e-5"
            )
        return super().parse_args(ctx, rest)


def _taken(
    args: Sequence[str],
    options: Mapping[str, Any],
    own_flags: Sequence[str],
    dialects: Sequence[FlagDialect],
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the flags with their values, and all other words; `own_flags` are a command's own."""
    taken = {*own_flags, *(flag for one in dialects for flag in (*one.names, *one.idle))}
    repeated = {*own_flags, *(flag for one in dialects for flag in one.several)}
    switches = {flag for one in dialects for flag in (*one.switches, *one.idle)}
    chosen: dict[str, list[str]] = {}
    rest: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        known = word.startswith("--") and name not in options and name in taken
        several = name in repeated if known else getattr(options.get(name), "multiple", 0)
        if not known and not (several and word.startswith("--")):
            rest.append(word)
            continue
        following = words[0].removeprefix("--").partition("=")[0] if words else ""
        if equals:
            values = [value]
        elif known and name in switches and is_alone(words):
            values = ["true"]
        elif known and (not words or (words[0] == f"--{following}" and following in taken)):
            raise typer.BadParameter(f"--{name} needs a value")
        else:
            values = [words.pop(0)] if words else []
        while several and words and not _is_other(words[0]):
            values.append(words.pop(0))
        if known:
            chosen[name] = [*chosen.get(name, []), *values] if several else values
        else:
            rest += [part for one in values for part in (f"--{name}", one)]
    return chosen, rest


def is_alone(words: Sequence[str]) -> bool:
    """Return whether a switch has no value, given the words after it."""
    return not words or _is_other(words[0])


def _is_other(word: str) -> bool:
    """Return whether a word after several values is not one more of them."""
    return word.startswith("-") or "=" in word or is_yaml(word)


def is_yaml(word: str) -> bool:
    """Return whether a plain word names a configuration: a YAML, or the TOML of another system,
    which is refused with what replaces its keys.
    """
    return word.endswith((".yaml", ".yml", ".toml")) and "=" not in word


def yaml_and_keys(
    config: Path | None, words: Sequence[str] | None, flags: Mapping[str, list[str]] | None
) -> tuple[Path | None, list[str]]:
    """Return the configuration, which may be a plain word, and the keys to set, those of flags
    first.

    Raises BadParameter for other words.
    """
    ours: list[str] = []
    keys: list[str] = []
    for word, following in pairwise([*(words or ()), ""]):
        if not is_yaml(word) and (sentence := deleting(word)):
            raise typer.BadParameter(sentence)
        if word == "@" and is_yaml(following):  # prime-rl's sign for a file
            continue
        if is_yaml(word) and config is None:
            config = Path(word)
        elif "=" in word and not is_yaml(word):
            keys.append(word)
        else:
            also = f"; the YAML is {config} already" if is_yaml(word) else ", or a YAML (*.yaml)"
            raise typer.BadParameter(f"{word}: expected KEY=VALUE{also}")
    for dialect in flag_dialects():
        theirs = {*dialect.names, *dialect.idle}
        passed = {name: values for name, values in (flags or {}).items() if name in theirs}
        ours += dialect.overrides(passed, config)
    return config, [*ours, *keys]

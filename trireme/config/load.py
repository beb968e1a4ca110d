"""Load: reads a YAML file and command-line overrides into a Config, or reports all problems."""

from __future__ import annotations

import itertools
import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from trireme.config import ConfigError, Problem
from trireme.config.dialect import deleting, dialects, replaced, replacements, unread
from trireme.config.lookup import near_path
from trireme.config.options import converted, misfit_text, range_text, split, without_none
from trireme.config.schema import Config
from trireme.config.section import Instead, Section, section_in
from trireme.config.stages import moved_keys
from trireme.config.variables import either_name

_KNOWN_HERE = "known here: "
_MOST_PLACES = 3
"""A nearest key can be suggested if at most this many sections have a key of the name."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration in the file `path`, with `overrides` (`a.b.c=value`) applied.

    `${oc.env:VAR,default}` and OmegaConf's other interpolations are resolved. A run without
    `project` and `name` has those of the file's folder and of the file. Plug-ins, data and
    models with a relative path are looked up next to the file, then in the working directory; those
    of `overrides` in the opposite order. Modules next to the file become importable. Raises
    ConfigError with every problem.
    """
    config, problems = read_config(path, overrides)
    if problems:
        raise ConfigError(problems, str(path))
    return config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[Problem]]:
    """Read as `load_config` does, but return the problems with the values; wrong keys have their
    default.

    Raises ConfigError only if the file is not YAML. Of a TOML, which other systems read, that error
    also has the sentence on each of its keys.
    """
    if not isinstance(path, str | Path):
        raise ConfigError([Problem("", f"{path!r:.60} is no path: expected that of a YAML")])
    path = Path(path)
    if path.suffix == ".toml" and path.is_file():
        raise ConfigError(_problems_of_toml(path, overrides))
    try:
        tree = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise ConfigError(
            [Problem("", f"there is no configuration file {path}{near_path(path)}")]
        ) from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        reason = _tab(path, error) or _at_line(error) or " ".join(str(error).split())
        raise ConfigError([Problem("", f"{path} cannot be read as YAML: {reason}")]) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError([Problem("", f"{path} holds a list: expected sections with keys")])
    _keep_names(tree, path)
    problems: list[Problem] = []
    typed = [_override(tree, override, problems) for override in overrides]
    folder = path.parent.resolve()
    with either_name():
        plain = _resolved(tree, "", problems)
    notes = [note for dialect in dialects() for note in dialect.keys(plain)]
    plain.setdefault("project", folder.name or Config().project)  # the root has no name
    plain.setdefault("name", path.stem)
    values = _values_of(plain, folder, typed, problems)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # for `my_file:name` of a file next to the YAML
    config = Config.model_validate(values)
    config._notes = tuple(notes)
    return config, problems


_NAMES = re.compile(r"project|group|name|stages\[\d+\]\.stage_name")
"""Keys of folders' names, whose text counts also where YAML reads it as a number: `name: 0131` is
not 89.
"""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _keep_names(tree: DictConfig, path: Path) -> None:
    """Set the names of folders that YAML has read as numbers to the text in the file."""
    values = OmegaConf.to_container(tree)
    assert isinstance(values, dict), "a section was read"
    sections: list[tuple[str, Any]] = [("", values)]
    if isinstance(stages := values.get("stages"), list):
        sections += [(f"stages[{i}].", stage) for i, stage in enumerate(stages)]
    numbers = [
        f"{prefix}{key}"
        for prefix, section in sections
        for key, value in (section.items() if isinstance(section, dict) else ())
        if _NAMES.fullmatch(f"{prefix}{key}") and _is_number(value)
    ]
    if numbers:
        texts = OmegaConf.create(yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader))
        for key in numbers:
            OmegaConf.update(tree, key, OmegaConf.select(texts, key))


def _problems_of_toml(path: Path, overrides: Sequence[str]) -> list[Problem]:
    problems = [Problem("", f"{path} is TOML: expected a YAML")]
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        values = with_overrides(values, overrides)
    except ConfigError as error:
        return [*problems, *error.problems]
    except (tomllib.TOMLDecodeError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        return [Problem("", f"{path} cannot be read as TOML: {' '.join(str(error).split())}")]
    _mend(values, problems)
    return problems


def _tab(path: Path, error: Exception) -> str:
    """Return the line with the tab that made YAML's reader fail; '' if it was something else."""
    if (mark := getattr(error, "problem_mark", None)) is None:
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" not in line[: len(line) - len(line.lstrip())]:
        return ""
    return f"line {mark.line + 1} is indented with a tab: expected spaces"


def _at_line(error: Exception) -> str:
    """Return what YAML's reader found wrong, after the line; '' for an error without one."""
    mark, what = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not what:
        return ""
    context, begun = getattr(error, "context", None), getattr(error, "context_mark", None)
    since = f" {context}" if context else ""
    if since and begun is not None and begun.line != mark.line:
        since += f" that begins in line {begun.line + 1}"
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}{since}"


def config_of(
    values: Mapping[str, Any], more: Mapping[str, Any], arguments: Sequence[str] = ()
) -> Config:
    """Make the configuration of plain values, with `more` applied: sections, or keys `a.b.c`.

    Relative paths start in the working directory. `arguments` are valid names besides the keys of
    `more`, suggested for misspelt ones. Raises ConfigError with every problem.
    """
    problems: list[Problem] = []
    try:
        tree = OmegaConf.create(dict(values))
        for key, value in more.items():
            name = re.split(r"[.\[]", key, maxsplit=1)[0]
            if name not in Config.model_fields:  # may be a function, which YAML lacks
                near = get_close_matches(name, arguments, n=1, cutoff=0.8)
                unknown = _Misfit((name,), name, None, Config, "", False)
                text = f"did you mean '{near[0]}'?" if near else _meant(unknown)
                problems.append(Problem(name, f"is not a known key; {text}"))
                continue
            OmegaConf.update(tree, key, value, merge=True)
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            [Problem(error.full_key or "", f"{reason}: expected what a YAML can hold")]
        ) from error
    with either_name():
        plain = _resolved(tree, "", problems)
    resolved = _values_of(plain, Path.cwd(), [], problems)
    if problems:
        raise ConfigError(problems)
    return Config.model_validate(resolved)


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `a.b.c=value` to plain values. Raises ConfigError for an invalid override."""
    tree = OmegaConf.create(dict(values))
    problems: list[Problem] = []
    for override in overrides:
        _override(tree, override, problems)
    if problems:
        raise ConfigError(problems)
    made = OmegaConf.to_container(tree)
    assert isinstance(made, dict), "a section was given"
    return {str(key): value for key, value in made.items()}


def _values_of(
    values: dict[str, Any], folder: Path, typed: Sequence[str], problems: list[Problem]
) -> dict[str, Any]:
    """Convert plain values to the schema's types, with paths resolved from `folder`."""
    _mend(values, problems)
    _move(values, problems)
    _locate(values, "", folder, typed, problems)
    return values


def _override(tree: DictConfig, override: str, problems: list[Problem]) -> str:
    """Set one `a.b[0].c=value` in the tree; the value is read as YAML. Hydra's `+a.b=value`, which
    adds a key, is the same. Returns the key.
    """
    key, equals, text = override.partition("=")
    key = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", key.strip().removeprefix("--").lstrip("+"))
    if sentence := deleting(override):
        problems.append(Problem("", sentence))
        return key
    if not equals or not key:
        problems.append(Problem("", f"override {override!r}: expected key=value"))
        return key
    head, bracket, index = key.rpartition("[")
    try:
        read = OmegaConf.from_dotlist([f"value={text}"])
        value = OmegaConf.select(read, "value") if text.strip() else ""
        if _NAMES.fullmatch(key) and _is_number(value):
            value = text.strip()
        entries = OmegaConf.select(tree, head) if bracket else None
        if bracket and not isinstance(entries, ListConfig | DictConfig):
            problems.append(Problem(key, f"cannot be set: the file has no list {head}"))
            return key
        index = index.partition("]")[0]
        if isinstance(entries, ListConfig) and index.isdecimal() and int(index) >= len(entries):
            last = f"the last entry of {head} is [{len(entries) - 1}]"
            text = last if len(entries) else f"{head} is empty"
            problems.append(Problem(key, f"cannot be set: {text}"))
            return key
        OmegaConf.update(tree, key, value, merge=False)
    except (OmegaConfBaseException, yaml.YAMLError, IndexError, TypeError, ValueError) as error:
        problems.append(Problem(key, f"cannot be set to {text!r}: {str(error).splitlines()[0]}"))
    return key


def _resolved(node: Any, key: str, problems: list[Problem]) -> Any:
    """Return the plain values of an OmegaConf tree; an interpolation that fails is reported and
    left out.
    """
    if not isinstance(node, DictConfig | ListConfig):
        return node
    is_list = isinstance(node, ListConfig)
    names: list[Any] = list(range(len(node)) if is_list else node.keys())
    out: dict[Any, Any] = {}
    for name in names:
        at = f"{key}[{name}]" if is_list else f"{key}.{name}" if key else str(name)
        try:
            out[name] = _resolved(node[name], at, problems)
        except OmegaConfBaseException as error:
            problems.append(Problem(at, _unresolved(str(error))))
    return list(out.values()) if is_list else out


def _unresolved(reason: str) -> str:
    """Explain why an interpolation has no value."""
    variable = re.search(r"Environment variable '(.+?)' not found", reason)
    if variable:
        return f"needs the environment variable {variable[1]}, which is not set"
    return f"cannot be resolved: {reason.splitlines()[0]}"


_PATHS = ("path", "model_path", "critic_model_path", "chat_template_path", "cwd")


def _locate(
    values: Any, key: str, folder: Path, typed: Sequence[str], problems: list[Problem]
) -> None:
    """Replace relative paths of plug-ins, data and models by the paths where they are.

    `typed` are the keys that were set on the command line.
    """
    node: Any = values  # a section or a list
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for name, value in pairs:
        at = f"{key}[{name}]" if isinstance(values, list) else f"{key}.{name}".lstrip(".")
        if isinstance(value, dict | list):
            _locate(value, at, folder, typed, problems)
        elif not isinstance(value, str) or not value or "://" in value:
            continue
        elif (is_plugin := key == "plugins") or name in _PATHS:
            here_first = any(at == one or at.startswith((f"{one}.", f"{one}[")) for one in typed)
            sibling, here = folder / value, Path(value).expanduser()
            files = [place for place in (sibling, here) if os.path.exists(place)]
            first = files[-1 if here_first else 0] if files else None
            if first is not None and (is_plugin or first is sibling):
                node[name] = os.path.abspath(first)  # a link stays a link
            elif is_plugin and first is None:
                near = near_path(sibling).replace(f"{folder}/", "")
                expected = f"a file or folder, in {folder} or here{near}"
                problems.append(Problem("plugins", f"is {value!r}: expected {expected}"))


def _move(values: dict[str, Any], problems: list[Problem]) -> None:
    """Move the values of keys that are read as others to those keys."""
    for key, target, value, gives_way in list(moved_keys(Config.model_validate(values))):
        *path, name = (int(p) if p.isdigit() else p for p in re.findall(r"[^.\[\]]+", target))
        place: Any = values
        for part in path:
            if isinstance(place, dict) and place.get(part) is None:
                place[part] = {}
            place = place[part]
        if place.get(name) is None:
            place[name] = value
        elif place[name] != value and not gives_way:
            text = f"is {value!r} and {target} {place[name]!r}: they are one, set either"
            problems.append(Problem(key, text))
    _mend(values, problems)


class _Misfit(NamedTuple):
    """A value that the schema rejects."""

    path: tuple[Any, ...]
    key: str
    kind: Any
    """The expected type; None: the key is unknown."""
    section: type[Section]
    """The innermost section around the value."""
    reason: str
    """Pydantic's name for the error."""
    is_key: bool
    """Whether the key itself is wrong: it is not text."""
    marks: Sequence[Any] = ()
    """Annotations of the expected type, such as the range of a number."""


def _mend(values: dict[str, Any], problems: list[Problem]) -> None:
    """Make the values fit a Config: convert values that are only written differently, report and
    remove those that do not fit.

    An empty section or list has its default: it is removed without a report.
    """
    while misfits := list(_misfits(values)):
        keys_first = [misfit for misfit in misfits if misfit.is_key] or misfits
        if not any([_convert(values, misfit) for misfit in keys_first]):
            break
    each = {misfit.path: misfit for misfit in misfits}  # each arm of a union reports an error
    in_order = sorted(each.values(), key=lambda misfit: _order(values, misfit.path))
    for misfit in in_order:
        value = _at(values, misfit.path)
        if misfit.kind is None:
            problems += _unknown(misfit, value)
        elif text := _sentence(misfit, value):
            problems.append(Problem(misfit.key, text))
    for misfit in reversed(in_order):
        del _at(values, misfit.path[:-1])[misfit.path[-1]]


def _misfits(values: dict[str, Any]) -> Iterator[_Misfit]:
    try:
        Config.model_validate(values)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            is_key = item["loc"][-1] == "[key]"
            loc = item["loc"][:-1] if is_key else item["loc"]
            kind, section, key, depth = Config, Config, "", 0
            marks: Sequence[Any] = ()
            for part in loc:
                kind = without_none(kind)
                if isinstance(kind, type) and issubclass(kind, Section):
                    section = kind
                    known = section.model_fields.get(str(part))
                    kind, marks = (known.annotation, known.metadata) if known else (None, ())
                elif get_origin(kind) in (list, dict):
                    kind, marks = get_args(kind)[-1], ()
                else:
                    break  # the rest names arms of a union
                marks = [*marks, *split(kind)[1]]
                is_item = isinstance(_at(values, loc[:depth]), list)
                key += f"[{part}]" if is_item else f".{part}"
                depth += 1
            path, key = loc[:depth], key.removeprefix(".")
            yield _Misfit(path, key, kind, section, item["type"], is_key, marks)


def _convert(values: dict[str, Any], misfit: _Misfit) -> bool:
    """Convert the value to the schema's type, if that is unambiguous."""
    place, name = _at(values, misfit.path[:-1]), misfit.path[-1]
    if misfit.is_key:
        named = {str(key): value for key, value in place.items()}
        place.clear()
        place.update(named)
        return True
    value = None if misfit.kind is None else converted(misfit.kind, place[name])
    if value is None or (type(value), value) == (type(place[name]), place[name]):
        return False
    place[name] = value
    return True


def _sentence(misfit: _Misfit, value: Any) -> str:
    """Describe what is wrong with a value, after its key; empty if its default is meant."""
    kind = misfit.kind
    if value is None and (section_in(kind) or get_origin(without_none(kind)) in (list, dict)):
        return ""
    low = isinstance(value, int | float) and value <= 0  # false, as YAML reads `off`, too
    way = "".join(f"; {mark.text}" for mark in misfit.marks if low and isinstance(mark, Instead))
    if misfit.reason in ("greater_than", "greater_than_equal", "less_than_equal"):
        return f"is {value!r}: expected a number {range_text(misfit.marks)}{way}"
    is_number = without_none(kind) is float and isinstance(value, str)
    is_time = is_number and misfit.key.endswith(("_timeout", "_time"))
    return f"{misfit_text(kind, value)}{' of seconds' * is_time}{way}"


def _unknown(misfit: _Misfit, value: Any) -> list[Problem]:
    """Describe an unknown key; of a section of another system, each key with ours for it."""
    of_section = f"{misfit.section.place}.{misfit.path[-1]}"  # in an item of a list too
    if needs := unread(misfit.key) or unread(of_section):
        return [Problem(misfit.key, needs)]
    hints = [(key, hint) for key, hint in replacements(misfit.key, value) if hint]
    if not hints:
        hints = [(misfit.key, meant := _meant(misfit))]
        # a section of a name that no system has may hold another system's keys
        inner = value if isinstance(value, dict) and meant.startswith(_KNOWN_HERE) else {}
        theirs = {name: replaced(str(name)) for name in inner}
        hints = [(f"{misfit.key}.{name}", its) for name, its in theirs.items() if its] or hints
    return [Problem(key, f"is not a known key; {hint}") for key, hint in hints]


def _at(values: Any, path: Sequence[Any]) -> Any:
    return reduce(getitem, path, values)


def _order(values: Any, path: Sequence[Any]) -> list[int]:
    """Return a value's place in the file, at each level."""
    places = []
    for part in path:
        places.append(part if isinstance(values, list) else list(values).index(part))
        values = values[part]
    return places


def _meant(misfit: _Misfit) -> str:
    """Suggest the nearest key of the schema for an unknown one, here or elsewhere."""
    name, siblings = str(misfit.path[-1]), misfit.section.model_fields
    if hint := replaced(name):
        return hint
    near = get_close_matches(name, siblings, n=1, cutoff=0.75) or _longer(misfit, siblings)
    if near:
        return f"did you mean '{misfit.key.removesuffix(name)}{near[0]}'?"
    keys = [key for key in _full_keys(Config) if not key.startswith("stages.")]
    near = get_close_matches(name, {key.rpartition(".")[2] for key in keys}, n=1, cutoff=0.8)
    if near:
        candidates = [key for key in keys if key.rpartition(".")[2] == near[0]]
        above = misfit.key.removesuffix(name)
        plain = re.sub(r"\[\d+\]", "", above)
        below = [key.removeprefix(plain) for key in candidates if key.startswith(plain)]
        if above and len(below) == 1:
            return f"did you mean '{above}{below[0]}'?"
        if len(candidates) <= _MOST_PLACES:  # common names such as `name` match too many sections
            best = max(candidates, key=lambda key: (_shared(key, misfit.key), -key.count(".")))
            return f"did you mean '{best}'?"
    return f"{_KNOWN_HERE}{', '.join(siblings)}"


def _longer(misfit: _Misfit, siblings: Collection[str]) -> list[str]:
    """Return the key here that an unknown one is the end of: `model.path` is `model.model_path`."""
    *_, section, name = ("", *re.findall(r"[^.\[\]]*[^.\[\]\d][^.\[\]]*", misfit.key))
    if f"{section}_{name}" in siblings:
        return [f"{section}_{name}"]
    ends = [one for one in siblings if one.endswith(f"_{name}")]
    return ends if len(ends) == 1 else []


def _shared(key: str, other: str) -> int:
    """Count the sections that two keys have in common."""
    pairs = zip(key.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _full_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield every key of the schema by its full name, including the keys in lists of sections."""
    for name, item in section.model_fields.items():
        yield f"{prefix}{name}"
        inner = section_in(item.annotation)
        if inner is not None and get_origin(without_none(item.annotation)) is not dict:
            yield from _full_keys(inner, f"{prefix}{name}.")

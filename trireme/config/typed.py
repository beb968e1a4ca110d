"""Typed: checks plain values against the schema, and builds the schema's dataclasses from them.

Nothing stops at the first problem: each is noted, and the value that does not fit is left out.
"""

from __future__ import annotations

import itertools
import math
import operator
import types
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trireme.config.problem import Problem
from trireme.config.schema import Config
from trireme.nearest import did_you_mean

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_LIMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le}
_MOST_PLACES = 3
"""Sections with a key of one name among which a nearest one can be told."""
UNIONS = (Union, types.UnionType)


@cache
def hints(section: type) -> dict[str, Any]:
    """Field name -> type, of a dataclass of the schema."""
    return get_type_hints(section)


def clean(
    section: type, values: dict[str, Any], key: str, problems: list[Problem]
) -> dict[str, Any]:
    """The values that fit the fields of `section`, inner sections as dictionaries as well.

    Unknown keys and what does not fit are noted in `problems`. `key` is the section's full name.
    """
    known = {item.name: item for item in fields(section)}
    out: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{key}.{name}" if key else str(name)
        item = known.get(name)
        if item is None:
            problems.append(Problem(full, f"is not a known key; {_meant(full, str(name), known)}"))
            continue
        kind = item.metadata.get("partial") or hints(section)[name]
        for found in fitting(kind, value, full, problems):
            limits = _limits(item)
            if found is None or all(_LIMITS[limit](found, bound) for limit, bound in limits):
                out[name] = found
            else:
                text = f"is {found!r}: expected a number {range_text(item)}"
                problems.append(Problem(full, text))
    return out


def build(kind: Any, value: Any) -> Any:
    """A clean value with dataclasses in place of dictionaries; what it lacks has its default."""
    kind = _plain(kind)
    inner = section_in(kind)
    if inner is None or value is None:
        return value
    if inner is kind:
        return inner(**{name: build(hints(inner)[name], given) for name, given in value.items()})
    if isinstance(value, list):
        return [build(inner, item) for item in value]
    return {name: build(inner, item) for name, item in value.items()}


def section_in(kind: Any) -> type | None:
    """The dataclass that a type holds, itself or as list items or dictionary values."""
    kind = _plain(kind)
    if is_dataclass(kind):
        return kind if isinstance(kind, type) else None
    return section_in(get_args(kind)[-1]) if get_origin(kind) in (list, dict) else None


def _plain(kind: Any) -> Any:
    """`X` for `X | None`."""
    rest = [part for part in get_args(kind) if part is not type(None)]
    return rest[0] if get_origin(kind) in UNIONS and len(rest) == 1 else kind


def fitting(kind: Any, value: Any, key: str, problems: list[Problem]) -> list[Any]:
    """The value as the type has it, alone in a list; none where it does not fit, which is noted.

    An empty section or list has its default: there is none either, and nothing is noted.
    """
    plain = _plain(kind)
    if value is None and (plain is not kind or type(None) in get_args(kind)):
        return [None]
    if value is None and (is_dataclass(plain) or get_origin(plain) in (list, dict)):
        return []
    found = _converted(plain, value, key, problems)
    if found is not None:
        return [found]
    expected = kind_text(plain)
    if get_origin(plain) is Literal and isinstance(value, str):
        expected += did_you_mean(value.lower(), get_args(plain))
    given = "empty" if value is None else repr(value)
    problems.append(Problem(key, f"is {given}: expected {expected}"))
    return []


def _converted(kind: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    """The value as the type has it; None where it is of another kind, which the caller notes."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        assert isinstance(kind, type)
        return clean(kind, value, key, problems)
    if origin is list and isinstance(value, list):
        items = [(f"{key}[{index}]", item) for index, item in enumerate(value)]
        return [v for at, item in items for v in fitting(parts[0], item, at, problems)]
    if origin is dict and isinstance(value, dict):
        named = [(str(name), item) for name, item in value.items()]
        return {
            name: v
            for name, item in named
            for v in fitting(parts[1], item, f"{key}.{name}", problems)
        }
    if origin is Literal and isinstance(value, str):
        return next((choice for choice in parts if choice.lower() == value.lower()), None)
    if origin in UNIONS:
        for part in parts:
            tried: list[Problem] = []
            found = _converted(part, value, key, tried)
            if found is not None and not tried:
                return found
    return value if kind is Any else _scalar(kind, value)


def _scalar(kind: Any, value: Any) -> Any:
    """Numbers and truth values may also be spelled as text, since environment variables are."""
    if kind is bool:
        words = {"true": True, "false": False}
        found = words.get(value.lower()) if isinstance(value, str) else value
        return found if isinstance(found, bool) else None
    if kind not in _WORDS or isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if kind is str or (kind is int and isinstance(value, int)):
        return kind(value)
    try:
        number = float(value)
    except ValueError:
        return None
    fits = math.isfinite(number) and (kind is float or number.is_integer())
    return kind(number) if fits else None


def _limits(item: Field[Any]) -> list[tuple[str, float]]:
    """What bounds a numeric field: names of `number`'s arguments, with their values."""
    return [(name, item.metadata[name]) for name in _LIMITS if name in item.metadata]


def range_text(item: Field[Any]) -> str:
    """The range of a numeric field in words, empty where it has none."""
    return " and ".join(f"{name.replace('_', ' ')} {bound:g}" for name, bound in _limits(item))


def kind_text(kind: Any) -> str:
    """A type in words: what the user may write."""
    kind = _plain(kind)
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(get_args(kind))
    if origin is list:
        return "a list"
    if origin is dict or is_dataclass(kind):
        return "a section with keys of its own"
    if origin in UNIONS:
        return " or ".join(kind_text(p) for p in get_args(kind) if p is not type(None))
    return _WORDS.get(kind, "any value")


def _meant(full: str, name: str, siblings: dict[str, Any]) -> str:
    """What the schema has in place of an unknown key: the nearest one, here or elsewhere."""
    near = get_close_matches(name, siblings, n=1, cutoff=0.75)
    if near:
        parent = full.rpartition(".")[0]
        return f"did you mean '{f'{parent}.' if parent else ''}{near[0]}'?"
    keys = [key for key in _full_keys(Config) if not key.startswith("stages.")]
    near = get_close_matches(name, {key.rpartition(".")[2] for key in keys}, n=1, cutoff=0.8)
    if near:
        found = [key for key in keys if key.rpartition(".")[2] == near[0]]
        if len(found) <= _MOST_PLACES:  # `name` and its like say nothing
            best = max(found, key=lambda key: (_shared(key, full), -key.count(".")))
            return f"did you mean '{best}'?"
    return f"known here: {', '.join(siblings)}"


def _shared(key: str, other: str) -> int:
    """How many sections two keys have in common."""
    pairs = zip(key.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _full_keys(section: type, prefix: str = "") -> Iterator[str]:
    """Every key of the schema by its full name, lists of sections by their own."""
    for name, kind in hints(section).items():
        yield f"{prefix}{name}"
        inner = section_in(kind)
        if inner is not None and get_origin(_plain(kind)) is not dict:
            yield from _full_keys(inner, f"{prefix}{name}.")

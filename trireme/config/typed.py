"""Typed: checks plain values against the schema, and builds the schema's dataclasses from them.

`clean` never stops at the first problem: it notes each and leaves the value out.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trireme.config.problem import Problem

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_INVALID = object()


@cache
def hints(section: type) -> dict[str, Any]:
    """Field name -> type, of a dataclass of the schema."""
    return get_type_hints(section)


def default(item: Field[Any]) -> Any:
    """What a field holds when the user does not give it."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


def clean(kind: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    """`value` as the schema's type `kind` has it, dataclasses as dictionaries of the given keys.

    What does not fit is noted in `problems` and left out.
    """
    found = _clean(kind, value, key, problems)
    return {} if found is _INVALID else found


def build(section: type, values: dict[str, Any]) -> Any:
    """The dataclass `section` from clean values; what is not given takes its default."""
    made = {name: _built(hints(section)[name], value) for name, value in values.items()}
    return section(**made)


def full_keys(section: type, prefix: str = "") -> Iterator[str]:
    """Every key of the schema by its full name, lists and dictionaries of sections by their own."""
    for name, kind in hints(section).items():
        key = f"{prefix}{name}"
        yield key
        inner = section_in(kind)
        if inner is not None and get_origin(_plain(kind)) is not dict:
            yield from full_keys(inner, f"{key}.")


def section_in(kind: Any) -> type | None:
    """The dataclass that a type holds, itself or as list items or dictionary values."""
    kind = _plain(kind)
    if is_dataclass(kind):
        return kind if isinstance(kind, type) else None
    arguments = get_args(kind) if get_origin(kind) in (list, dict) else ()
    return section_in(arguments[-1]) if arguments else None


def _plain(kind: Any) -> Any:
    """`X` for `X | None`."""
    if get_origin(kind) in (Union, types.UnionType):
        rest = [part for part in get_args(kind) if part is not type(None)]
        return rest[0] if len(rest) == 1 else kind
    return kind


def _clean(kind: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    optional = get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)
    kind = _plain(kind)
    if value is None:
        if optional or section_in(kind) is not None or get_origin(kind) in (list, dict):
            return None if optional else _INVALID
        return _wrong(kind, value, key, problems)
    origin = get_origin(kind)
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        return _clean_section(kind, value, key, problems)
    if origin is list:
        return _clean_list(get_args(kind)[0], value, key, problems)
    if origin is dict:
        return _clean_dict(get_args(kind)[1], value, key, problems)
    if origin is Literal:
        for choice in get_args(kind):
            if isinstance(value, str) and value.lower() == choice.lower():
                return choice
        return _wrong(kind, value, key, problems)
    if origin in (Union, types.UnionType):
        for part in get_args(kind):
            tried: list[Problem] = []
            found = _clean(part, value, key, tried)
            if not tried:
                return found
        return _wrong(kind, value, key, problems)
    return _clean_scalar(kind, value, key, problems)


def _clean_section(section: type, value: Any, key: str, problems: list[Problem]) -> Any:
    if not isinstance(value, dict):
        problems.append(Problem.value(key or "the file", value, "a section with keys of its own"))
        return _INVALID
    known = {item.name: item for item in fields(section)}
    out: dict[str, Any] = {}
    for name, given in value.items():
        full = f"{key}.{name}" if key else str(name)
        if name not in known:
            problems.append(Problem(full, _unknown(full, str(name), list(known))))
            continue
        item = known[name]
        partial = item.metadata.get("partial")
        found = _clean(partial or hints(section)[name], given, full, problems)
        if found is not _INVALID and _in_range(item, found, full, problems):
            out[name] = found
    return out


def _clean_list(kind: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    if not isinstance(value, list):
        return _wrong(list[kind], value, key, problems)
    found = [_clean(kind, v, f"{key}[{i}]", problems) for i, v in enumerate(value)]
    return [v for v in found if v is not _INVALID]


def _clean_dict(kind: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    if not isinstance(value, dict):
        return _wrong(dict[str, kind], value, key, problems)
    found = {str(k): _clean(kind, v, f"{key}.{k}", problems) for k, v in value.items()}
    return {k: v for k, v in found.items() if v is not _INVALID}


def _clean_scalar(kind: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    """Numbers and truth values may also be spelled as text, since environment variables are."""
    if kind is bool:
        words = {"true": True, "false": False}
        found = words.get(value.lower()) if isinstance(value, str) else value
        return found if isinstance(found, bool) else _wrong(kind, value, key, problems)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return _wrong(kind, value, key, problems)
    if kind is str:
        return str(value)
    if kind is int and isinstance(value, int):
        return value
    try:
        number = float(value)
    except ValueError:
        return _wrong(kind, value, key, problems)
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        return _wrong(kind, value, key, problems)
    return int(number) if kind is int else number


def _in_range(item: Field[Any], value: Any, key: str, problems: list[Problem]) -> bool:
    """Whether a number lies where its field says; notes a problem where not."""
    wanted = range_text(item)
    if value is None or not wanted:
        return True
    limits = item.metadata
    fits = (
        (limits["at_least"] is None or value >= limits["at_least"])
        and (limits["above"] is None or value > limits["above"])
        and (limits["at_most"] is None or value <= limits["at_most"])
    )
    if not fits:
        problems.append(Problem.value(key, value, f"a number {wanted}"))
    return fits


def range_text(item: Field[Any]) -> str:
    """The range of a numeric field in words, empty where it has none."""
    words = {"at_least": "at least", "above": "above", "at_most": "at most"}
    parts = [
        f"{word} {item.metadata[name]:g}"
        for name, word in words.items()
        if item.metadata.get(name) is not None
    ]
    return " and ".join(parts)


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
    if origin in (Union, types.UnionType):
        return " or ".join(kind_text(part) for part in get_args(kind))
    return _WORDS.get(kind, "any value")


def _wrong(kind: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    expected = kind_text(kind)
    if get_origin(kind) is Literal and isinstance(value, str):
        near = get_close_matches(value.lower(), get_args(kind), n=1)
        expected += f"; did you mean '{near[0]}'?" if near else ""
    given = "empty" if value is None else repr(value)
    problems.append(Problem(key, f"is {given}: expected {expected}"))
    return _INVALID


def _unknown(full: str, name: str, siblings: list[str]) -> str:
    """What to say of a key that the schema does not have: the nearest one, here or elsewhere."""
    parent = full.rpartition(".")[0]
    near = get_close_matches(name, siblings, n=1, cutoff=0.75)
    if near:
        return f"is not a known key; did you mean '{f'{parent}.' if parent else ''}{near[0]}'?"
    elsewhere = _nearest_elsewhere(name)
    if elsewhere:
        return f"is not a known key; did you mean '{elsewhere}'?"
    return f"is not a known key; known here: {', '.join(siblings)}"


def _nearest_elsewhere(name: str) -> str | None:
    """The shortest full key whose last part is `name` or nearly so."""
    from trireme.config.schema import Config

    keys = [key for key in full_keys(Config) if not key.startswith("stages.")]
    last = {key.rpartition(".")[2] for key in keys}
    near = get_close_matches(name, last, n=1, cutoff=0.8)
    found = [key for key in keys if near and key.rpartition(".")[2] == near[0]]
    return min(found, key=lambda key: key.count(".")) if found else None


def _built(kind: Any, value: Any) -> Any:
    kind = _plain(kind)
    if value is None:
        return None
    if is_dataclass(kind) and isinstance(kind, type):
        return build(kind, value)
    inner = section_in(kind)
    if inner is not None and isinstance(value, list):
        return [build(inner, item) for item in value]
    if inner is not None and isinstance(value, dict):
        return {name: build(inner, item) for name, item in value.items()}
    return value

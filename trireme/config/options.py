"""Options: checks values against types, in a section of the YAML and in a function's signature."""

from __future__ import annotations

import inspect
import math
import operator
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le

from trireme.registry import did_you_mean, refuse_unknown_options, signature_of

Share = Annotated[float, Ge(0), Le(1)]
"""A number from 0 to 1, in sections and in algorithms' functions."""
_MOST_SHOWN = 60
"""Most characters of a list or a section in a message."""
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_UNIONS = (Union, types.UnionType)
_RANGES = {"ge": operator.ge, "gt": operator.gt, "le": operator.le}


def without_none(kind: Any) -> Any:
    """Return `X` for `X | None`, and without annotations."""
    kind, _ = split(kind)
    rest = [part for part in get_args(kind) if part is not type(None)]
    return rest[0] if get_origin(kind) in _UNIONS and len(rest) == 1 else kind


def kind_text(kind: Any) -> str:
    """Describe a type: the values that the user may write."""
    kind = without_none(kind)
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(get_args(kind))
    if origin is list:
        return "a list"
    if origin is dict or hasattr(kind, "model_fields"):  # this test does not import pydantic
        return "a section with keys of its own"
    if origin in _UNIONS:
        return " or ".join(kind_text(p) for p in get_args(kind) if p is not type(None))
    return _WORDS.get(kind, "any value")


def range_text(metadata: Iterable[Any]) -> str:
    """Describe the range that annotations give a number; empty without one."""
    words = {"ge": "at least", "gt": "above", "le": "at most"}
    return " and ".join(f"{words[name]} {limit:g}" for name, limit in _limits(metadata).items())


def _limits(metadata: Iterable[Any]) -> dict[str, float]:
    """Return the limits that annotations give a number, by their names in `_RANGES`."""
    return {name: getattr(m, name) for m in metadata for name in _RANGES if hasattr(m, name)}


def misfit_text(kind: Any, value: Any) -> str:
    """Return the sentence, after its key, for a value that is not of this kind."""
    kind = without_none(kind)
    expected = kind_text(kind)
    if get_origin(kind) is Literal and isinstance(value, str):
        expected += did_you_mean(value.lower(), get_args(kind))
    if keys := list(getattr(kind, "model_fields", ())):
        name, _, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
        if name in keys and rest:
            expected += f"; the colon of a key has a space behind it: '{name}: {rest}'"
        else:
            expected += f", such as {', '.join(keys[:3])}"
    elif get_origin(kind) is list and isinstance(value, Mapping):
        expected += ", each entry of which begins with '- '"
    said = "empty" if value is None else repr(value)
    if isinstance(value, Mapping | list) and len(said) > _MOST_SHOWN:
        said = f"{said[:_MOST_SHOWN]} …"
    return f"is {said}: expected {expected}"


def converted(kind: Any, value: Any) -> Any:
    """Convert `value` to `kind` if it is only written differently; None if it cannot be converted.

    Numbers and truth values may be text, as in environment variables, and choices in capitals.
    """
    # Pydantic's lax mode has other rules: it takes 1, 0.0 and "on" for truth values, true for the
    # number 1 and "nan" for a number, and refuses "1e6", a number for text, and GRPO for grpo.
    kind = without_none(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in _UNIONS:
        return next((v for part in parts if (v := converted(part, value)) is not None), None)
    if origin is Literal and isinstance(value, str):
        return next((part for part in parts if part.lower() == value.lower()), None)
    if origin is list and isinstance(value, list):
        items = [converted(parts[0], item) for item in value]
        return None if None in items else items
    if kind is bool:
        words = {"true": True, "false": False}
        word = words.get(value.lower()) if isinstance(value, str) else value
        return word if isinstance(word, bool) else None
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


def fitting_options(
    whose: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    first: int = 0,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """Convert `options` to arguments of `function`; its first `first` arguments, and those named in
    `given`, are not options.

    Raises ValueError, with `whose` (such as `reward 'math'`) in front, for an option that is
    unknown, missing, or of another kind.
    """
    arguments = list(parameters_of(function).values())[first:]
    remaining = [p for p in arguments if p.name not in given and p.kind not in _COLLECTING]
    if not any(p.kind is p.VAR_KEYWORD for p in arguments):
        refuse_unknown_options(whose, options, [p.name for p in remaining])
    for argument in remaining:
        if argument.default is argument.empty and argument.name not in options:
            raise ValueError(f"{whose} needs the option '{argument.name}'")
    return checked_options(whose, function, options)


def checked_options(
    whose: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert `options` by the annotations of `function`; options without annotation stay as they
    are.

    Raises ValueError for a value that does not fit, or is out of its range (`Annotated[float,
    Ge(0)]`).
    """
    routine = inspect.isroutine(function) or inspect.isclass(function)
    kinds = _hints(function if routine else type(function).__call__)
    return {
        name: checked_value(whose, name, kinds[name], value) if name in kinds else value
        for name, value in options.items()
    }


def checked_value(whose: str, name: str, kind: Any, value: Any) -> Any:
    """Convert one value to `kind`. Raises ValueError, also if it is out of the range of `kind`."""
    kind, marks = split(kind)
    endless = value == math.inf and (kind is float or float in get_args(kind))
    if not _is_plain(kind) or endless:
        return value
    if value is None and type(None) in get_args(kind):
        return None
    typed = converted(kind, value)
    if typed is None:
        raise ValueError(f"{whose}: {name} {misfit_text(kind, value)}")
    number: Any = value if value == typed else typed  # 1 stays 1 where 1.0 would do
    limits = _limits(marks)
    if not all(_RANGES[key](number, limit) for key, limit in limits.items()):
        raise ValueError(f"{whose}: {name} is {number:g}: expected {_range(**limits)}")
    return number


def split(kind: Any) -> tuple[Any, Sequence[Any]]:
    """Split a type and its annotations, which may be on one arm of a union."""
    if get_origin(kind) is Annotated:
        return kind.__origin__, kind.__metadata__
    if get_origin(kind) in _UNIONS:
        parts = [split(part) for part in get_args(kind)]
        marks = [mark for _, marks in parts for mark in marks]
        return reduce(operator.or_, [part for part, _ in parts]), marks
    return kind, ()


def _range(ge: float | None = None, gt: float | None = None, le: float | None = None) -> str:
    if ge is not None and le is not None:
        return f"{ge:g} to {le:g}"
    limits = {"at least": ge, "more than": gt, "at most": le}
    return " and ".join(f"{word} {n:g}" for word, n in limits.items() if n is not None)


def accepted(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Select the keyword arguments that `function` takes; all of them if it has `**kwargs`."""
    parameters = parameters_of(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(available)
    return {name: value for name, value in available.items() if name in parameters}


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, by name."""
    return signature_of(function).parameters


def _is_plain(kind: Any) -> bool:
    """Return whether a YAML scalar can be recognized as this kind."""
    if get_origin(kind) in _UNIONS:
        return all(part is type(None) or _is_plain(part) for part in get_args(kind))
    return kind in _WORDS or get_origin(kind) is Literal


@lru_cache(maxsize=256)
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Map each argument to its type; empty if a user's annotations cannot be read."""
    try:
        called = function.__init__ if inspect.isclass(function) else function
        return get_type_hints(called, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}

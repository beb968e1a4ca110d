"""Sampling options: what a workflow or a client asks for in one call, over the YAML's.

Every way to an engine makes its Sampling here, so that all of them refuse the same in one sentence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from trireme.engines.engine import Sampling
from trireme.nearest import did_you_mean

_NAMES = tuple(field.name for field in dataclasses.fields(Sampling))


def with_options(base: Sampling, given: Mapping[str, Any]) -> Sampling:
    """`base` with the options of one call; None leaves an option as it is.

    Raises ValueError, naming the option, for one that there is not, or a value of another type or
    out of its range.
    """
    options = {name: value for name, value in given.items() if value is not None}
    for name in options:
        if name not in _NAMES:
            hint = did_you_mean(name, _NAMES, "did you mean '{}'? ")
            raise ValueError(f"sampling has no option '{name}': {hint}It has: {', '.join(_NAMES)}")
    try:
        return dataclasses.replace(base, **options)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        fields: Mapping[str, Any] = Sampling.__pydantic_fields__  # pyright: ignore
        raise ValueError(
            f"sampling {name} is {options.get(name)!r:.80}: expected {fields[name].description}"
        ) from None


def what_is_wrong(errors: Sequence[Any]) -> str:
    """The first of a request's errors in one sentence: the field, what was given and expected."""
    first = errors[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    if first["type"] == "missing":
        return f"the request's {field}: {first['msg']}"
    return f"the request's {field}: {first['msg']}, and it is {first.get('input')!r:.80}"

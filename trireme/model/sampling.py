"""Sampling options: what a workflow asks for in one call, over what its task's YAML says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trireme.engines.engine import Sampling
from trireme.nearest import did_you_mean

_NAMES = tuple(field.name for field in dataclasses.fields(Sampling))


def with_options(base: Sampling, given: Mapping[str, Any]) -> Sampling:
    """`base` with the options of one call; None leaves an option as it is.

    Raises ValueError for an option that there is not, or a value that makes no sense.
    """
    options = {name: value for name, value in given.items() if value is not None}
    for name in options:
        if name not in _NAMES:
            hint = did_you_mean(name, _NAMES, "did you mean '{}'? ")
            raise ValueError(f"sampling has no option '{name}': {hint}It has: {', '.join(_NAMES)}")
    if isinstance(options.get("stop"), str):
        options["stop"] = (options["stop"],)
    for name in ("stop", "stop_token_ids"):
        if name in options:
            options[name] = tuple(options[name])
    sampling = dataclasses.replace(base, **options)
    _check(sampling)
    return sampling


def _check(sampling: Sampling) -> None:
    """Raise ValueError, naming the option, for a value out of its range."""
    wrong = {
        "max_tokens": (sampling.max_tokens >= 1, "at least 1"),
        "n": (sampling.n >= 1, "at least 1"),
        "temperature": (sampling.temperature >= 0, "0 (greedy) or more"),
        "top_p": (0 < sampling.top_p <= 1, "above 0, at most 1"),
        "min_p": (0 <= sampling.min_p <= 1, "from 0 to 1"),
        "repetition_penalty": (sampling.repetition_penalty > 0, "above 0"),
    }
    for name, (fine, expected) in wrong.items():
        if not fine:
            raise ValueError(f"sampling {name} is {getattr(sampling, name)}: expected {expected}")

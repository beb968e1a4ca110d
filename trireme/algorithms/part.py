"""Part: one function of an algorithm with its options checked and its data found by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from trireme.registry import Registry

# Options that belong to the kind and not to the function, with their defaults.
COEFFICIENTS: dict[str, dict[str, float]] = {
    "kl_loss_fn": {"kl_coef": 0.001},
    "entropy_loss_fn": {"entropy_coef": 0.0},
}


@dataclass(frozen=True)
class Part:
    """A function with its options. Call it with a lookup that finds data by name."""

    kind: str
    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    coefficient: float = 1.0

    @property
    def label(self) -> str:
        """For messages: `policy_loss_fn 'ppo'`."""
        return f"{self.kind} '{self.name}'"

    def data(self) -> dict[str, bool]:
        """Names of the data that the function asks for, and whether it can do without."""
        return {
            p.name: p.default is not p.empty
            for p in inspect.signature(self.function).parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD
        }

    def __call__(self, lookup: Callable[[str, str], Any], has: Callable[[str], bool]) -> Any:
        """The function's result. `lookup(name, asked_by)` raises where there is no such data."""
        wanted = {
            name: lookup(name, self.label)
            for name, optional in self.data().items()
            if not optional or has(name)
        }
        return self.function(**wanted, **self.options)


def make_part(kind: str, registry: Registry, name: str, args: Mapping[str, Any] | None) -> Part:
    """The part called `name` with `args` over its defaults. ValueError for an unknown one."""
    function = registry.get(name)
    if not callable(function):
        raise ValueError(
            f"algorithm.{kind} '{name}' is not a function but {type(function).__name__}"
        )
    options = dict(args or {})
    allowed = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    coefficients = COEFFICIENTS.get(kind, {})
    for key in options:
        if key not in (*allowed, *coefficients):
            raise ValueError(_unknown_option(kind, name, key, [*allowed, *coefficients]))
    coefficient = 1.0
    for key, default in coefficients.items():
        coefficient = float(options.pop(key, default))
    return Part(kind, name, function, options, coefficient)


def _unknown_option(kind: str, name: str, key: str, known: list[str]) -> str:
    near = get_close_matches(key, known, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    has = f"It has: {', '.join(known)}" if known else "It has no options"
    return f"algorithm.{kind} '{name}' has no option '{key}'{hint}. {has}"

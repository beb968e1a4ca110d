"""Part: checks one function's options and binds its arguments to the batch's columns by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from trireme.batch import Columns
from trireme.config.dialect import adapted, options_in, unread
from trireme.config.options import checked_options, checked_value
from trireme.extensions import absent
from trireme.registry import (
    ADVANTAGES,
    ENTROPIES,
    KLS,
    POLICY_LOSSES,
    SAMPLES,
    refuse_unknown_options,
)
from trireme.usercode import UserCode

PARTS = {
    "advantage_fn": ADVANTAGES,
    "policy_loss_fn": POLICY_LOSSES,
    "kl_penalty_fn": KLS,
    "kl_loss_fn": KLS,
    "teacher_kl_fn": KLS,
    "entropy_loss_fn": ENTROPIES,
    "sample_strategy": SAMPLES,
}
"""Maps the key of a part to the registry of its names."""

AtLeast0 = Annotated[float, Ge(0)]
Above0 = Annotated[float, Gt(0)]

_KL = {"kl_coef": 0.001, "adaptive": False, "target_kl": 0.1, "horizon": 10000.0}
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("kl_coef", "entropy_coef"), AtLeast0),
    **dict.fromkeys(("target_kl", "horizon"), Above0),
    "top_entropy_quantile": Annotated[float, Gt(0), Le(1)],
    "max_resample_times": Annotated[int | None, Ge(0)],
}
# Options that belong to the kind and not to the function, with their defaults. The first one of a
# term of the loss is its coefficient.
SETTINGS: dict[str, dict[str, Any]] = {
    "advantage_fn": {"duplicate_experiences": False, "max_resample_times": None},
    "policy_loss_fn": {"top_entropy_quantile": 1.0},
    "kl_loss_fn": _KL,
    "kl_penalty_fn": _KL,
    "teacher_kl_fn": {**_KL, "kl_coef": 1.0},
    "entropy_loss_fn": {"entropy_coef": 0.0},
}


@dataclass(frozen=True)
class Part:
    """A function with its options. Call it with the columns that it may use."""

    kind: str
    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the kind, next to the function's own options."""
    before: Part | None = None
    """The part whose result the function starts from."""

    @property
    def label(self) -> str:
        """The part's name in messages: `policy_loss_fn 'ppo'`."""
        return f"{self.kind} '{self.name}'"

    @property
    def coefficient(self) -> float:
        """Return the factor of the part's result; the initial one if it adapts."""
        return float(next(iter(self.settings.values()), 1.0))

    def option(self, name: str) -> Any:
        """Return an option of the function itself, or its default; None if there is none of this
        name.
        """
        own = inspect.signature(self.function).parameters.get(name)
        return self.options.get(name, own.default if own is not None else None)

    def marked(self, name: str) -> bool:
        """True if the function has the mark `name`: `in_trainer`, `of_sequences` and the like."""
        return bool(getattr(self.function, name, False))

    def data(self) -> dict[str, bool]:
        """Map the names of the data that the function takes to whether it can do without."""
        return {
            p.name: p.default is not p.empty
            for p in inspect.signature(self.function).parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD
        }

    def __call__(self, columns: Columns) -> Any:
        """Call the function. Raises ValueError if it needs data that are missing."""
        wanted = {
            name: columns.get(name, asked_by=self.label)
            for name, optional in self.data().items()
            if not optional or name in columns
        }
        with UserCode(f"algorithm.{self.label}", self.function):
            return self.function(**wanted, **self.options)


def named(kind: str, part: str | Callable | None) -> str | None:
    """Return a part's name; a function given directly is registered under its own name."""
    if part is None or isinstance(part, str):
        return part
    if not callable(part) or not hasattr(part, "__name__"):
        raise ValueError(
            f"{kind} is {part!r:.60}: expected a name or a function; options are given as "
            f"options={{'{kind}': {{...}}}}"
        )
    PARTS[kind].register_module(part.__name__, part)
    return part.__name__


def make_part(kind: str, name: str, args: Mapping[str, Any] | None) -> Part:
    """Make the part called `name` with `args` over its defaults. Raises ValueError for an unknown
    one.
    """
    function = adapted(kind, name, PARTS[kind].get(name, kind=f"algorithm.{kind}"))
    if inspect.isclass(function):
        forms = ", ".join(sorted(set(absent("dialect").values())))
        other = f"; forms of other systems need an extension that is not here: {forms}"
        raise ValueError(
            f"algorithm.{kind} '{function.__name__}' is a class: expected a function"
            f"{other if forms else ''}"
        )
    if not callable(function):
        raise ValueError(
            f"algorithm.{kind} '{name}' is not a function but {type(function).__name__}"
        )
    return part_of(kind, name, function, args)


def part_of(
    kind: str, name: str, function: Callable[..., Any], args: Mapping[str, Any] | None
) -> Part:
    """Make a part from a function and its options. Raises ValueError for an unknown option."""
    options = dict(args or {})
    first = getattr(function, "starts_from", None)
    inherited = _own_options(first) if first else []
    allowed = [*_own_options(function), *inherited]
    # a part that averages has its own coefficient
    own = kind == "entropy_loss_fn" and getattr(function, "averages", False)
    settings = {} if own else dict(SETTINGS.get(kind, {}))
    whose, section = f"algorithm.{kind} '{name}'", f"algorithm.{kind}_args"
    for other, _, _ in options_in(section, options):  # it has no effect
        if other not in allowed:
            options.pop(other, None)
    for option in options:
        if option not in allowed and (need := unread(f"{section}.{option}")):
            raise ValueError(f"{section}.{option} {need}")
    refuse_unknown_options(whose, options, [*allowed, *settings])
    for key, default in settings.items():
        chosen = options.pop(key, default)
        settings[key] = checked_value(whose, key, _KINDS.get(key, type(default)), chosen)
    options = checked_options(whose, function, options)
    theirs = {key: options.pop(key) for key in inherited if key in options}
    before = part_of(kind, first.__name__, first, theirs) if first else None
    return Part(kind, name, function, options, settings, before)


def _own_options(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

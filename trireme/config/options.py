"""Options: whether what a YAML gives a function is what its signature takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trireme.config.problem import Problem
from trireme.config.typed import UNIONS, fitting
from trireme.nearest import refuse_unknown_options

_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_KINDS = (bool, int, float, str)
_SHARE, _AT_LEAST_0, _ABOVE_0 = (0.0, 1.0), (0.0, math.inf), (math.ulp(0.0), math.inf)
LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("gamma", "lam", "lambda_coef", "mu_peak", "mu_valley", "cutoff_prob"), _SHARE),
    **dict.fromkeys(("clip_range", "clip_range_low", "clip_range_high", "epsilon"), _AT_LEAST_0),
    **dict.fromkeys(("mask_clip_range_low", "mask_clip_range_high", "delta", "tau"), _AT_LEAST_0),
    **dict.fromkeys(("epsilon_low", "epsilon_high", "regularizer_coef"), _AT_LEAST_0),
    **dict.fromkeys(("epsilon_low_prime", "epsilon_high_prime", "std_threshold"), _AT_LEAST_0),
    **dict.fromkeys(("kl_coef", "entropy_coef", "max_staleness", "mu", "omega"), _AT_LEAST_0),
    **dict.fromkeys(("mu_warmup_steps", "mu_decay_steps", "rank_penalty"), _AT_LEAST_0),
    **dict.fromkeys(("tau_pos", "tau_neg", "temp", "temperature", "beta", "max_frac"), _ABOVE_0),
    **dict.fromkeys(("target_kl", "horizon", "chunk_size", "rollout_is_threshold"), _ABOVE_0),
    **dict.fromkeys(("rollout_rs_threshold", "rollout_rs_threshold_lower"), _ABOVE_0),
    "clip_ratio_c": (1.0, math.inf),
    "label_smoothing": (0.0, 0.5),
}
"""The least and most of the numbers that our own algorithms' parts take."""


def fitting_options(
    whose: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    first: int = 0,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """`options` as the arguments of `function` take them; the `first` so many of these, and those
    called as in `given`, are none.

    Raises ValueError, with `whose` (`reward 'math'`, say) in front, for one that is unknown, is
    missing, or is of another kind.
    """
    arguments = list(inspect.signature(function).parameters.values())[first:]
    own = [p for p in arguments if p.name not in given and p.kind not in _COLLECTING]
    if not any(p.kind is p.VAR_KEYWORD for p in arguments):
        refuse_unknown_options(whose, options, [p.name for p in own])
    for argument in own:
        if argument.default is argument.empty and argument.name not in options:
            raise ValueError(f"{whose} needs the option '{argument.name}'")
    return checked_options(whose, function, options)


def checked_options(
    whose: str, function: Callable[..., Any], options: Mapping[str, Any], *, limits: bool = False
) -> dict[str, Any]:
    """`options` as the annotations of `function` have them; what they do not say is not looked at.

    Raises ValueError for one that does not fit; `limits`: also for one out of its range.
    """
    kinds = _hints(function)
    return {
        name: checked_value(whose, name, kinds[name], value, limits=limits)
        if name in kinds
        else value
        for name, value in options.items()
    }


def checked_value(whose: str, name: str, kind: Any, value: Any, *, limits: bool = False) -> Any:
    """One value as `kind` has it. Raises ValueError; `limits`: also for one out of range."""
    if not _is_plain(kind) or value == math.inf:
        return value
    problems: list[Problem] = []
    found = fitting(kind, value, name, problems)
    if problems:
        raise ValueError(f"{whose}: {problems[0]}")
    least, most = LIMITS.get(name, (-math.inf, math.inf))
    number = value if value == found[0] else found[0]  # 1 stays 1 where 1.0 would do
    if limits and isinstance(number, int | float) and not least <= number <= most:
        bounds = f"{least:g} to {most:g}" if most < math.inf else f"at least {least:g}"
        raise ValueError(
            f"{whose}: {name} is {number:g}: expected "
            + ("more than 0" if least == _ABOVE_0[0] else bounds)
        )
    return number


def accepted(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Of what there is, the keyword arguments that `function` takes: all where it collects them."""
    parameters = parameters_of(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(available)
    return {name: value for name, value in available.items() if name in parameters}


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, by name."""
    return inspect.signature(function).parameters


def _is_plain(kind: Any) -> bool:
    """Whether it is one that a YAML's scalar can be told to be of."""
    if get_origin(kind) in UNIONS:
        return all(part is type(None) or _is_plain(part) for part in get_args(kind))
    return kind in _KINDS or get_origin(kind) is Literal


@lru_cache(maxsize=256)
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Argument -> type; none where a user's annotations cannot be read."""
    try:
        return get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except (NameError, TypeError, AttributeError):
        return {}

"""Nearest: the known name that somebody who mistyped one may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], form: str = "; did you mean '{}'?") -> str:
    """`form` with the nearest of the known names; nothing where none is near."""
    near = get_close_matches(name, list(known), n=1)
    return form.format(near[0]) if near else ""


def refuse_unknown_options(whose: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for the first option that `whose` (`reward 'math'`, say) does not have."""
    known = list(known)
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known, " (did you mean '{}'?)")
            has = f"It has: {', '.join(known)}" if known else "It has no options"
            raise ValueError(f"{whose} has no option '{option}'{hint}. {has}")

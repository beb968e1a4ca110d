"""Env: what a workflow needs of an environment, and how the usual forms of `step` are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Env(Protocol):
    """An environment with text to read and text to act by. Both may be coroutines."""

    def reset(self) -> Any:
        """The first observation, or `(observation, info)`."""
        ...

    def step(self, action: str) -> Any:
        """`(observation, reward, done, info)`, or gymnasium's five with `truncated`."""
        ...


@dataclass(frozen=True)
class Seen:
    """What an environment showed after a reset or a step."""

    observation: Any
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


def after_reset(given: Any) -> Seen:
    """Of what `reset` returned."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping | None):
        return Seen(given[0], info=given[1] or {})
    return Seen(given)


def after_step(given: Any) -> Seen:
    """Of what `step` returned: four values (gym, TextWorld) or five (gymnasium).

    Raises TypeError for anything else.
    """
    if not isinstance(given, tuple) or len(given) not in (4, 5):
        raise TypeError(
            f"the environment's step returned {given!r:.80}: expected (observation, reward, done, "
            "info), or (observation, reward, terminated, truncated, info)"
        )
    observation, reward, *ended, info = given
    return Seen(observation, float(reward or 0.0), any(map(bool, ended)), info or {})

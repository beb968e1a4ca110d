"""Steering: who may end a training, or ask for a checkpoint, while it runs.

Each kind is a class of the table STEERINGS. It is called without arguments, once to examine a
configuration and once where a trainer is made, in that one's process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan, Problem
from trireme.monitor.events import Emit
from trireme.registry import STEERINGS

EVENTS = ("on_init_end", "on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_save")
EVENTS += ("on_train_end",)
"""The events of a training, by transformers' names."""


class Steering(Protocol):
    """Hears of each event of a training, which then looks at its two attributes."""

    ended_by: str
    """The name and place of whoever ended the training, as a sentence; empty: nobody."""
    saves: bool
    """A checkpoint was asked for. The trainer sets it to False when it saves one."""

    async def tell(self, event: str, step: int, **facts: Any) -> None:
        """Take note of one of EVENTS; `step` train steps are done. The training waits for it."""
        ...


@dataclass(frozen=True)
class SteeringParts:
    """The training that is about to begin."""

    plan: Plan
    folder: JobFolder
    model: Any
    """The module that is trained."""
    broken_weights: Callable[[], Sequence[str]]
    """The names of those weights that are not finite."""
    emit: Emit


class SteeringKind(Protocol):
    """A kind of steering."""

    def examine(self, plan: Plan) -> Iterable[Problem]:
        """Yield the problems of a configuration. A ValueError or ImportError is a problem too."""
        ...

    def make(self, parts: SteeringParts) -> Steering | None:
        """Make the steering of this training; None where the configuration asks for nothing."""
        ...


def examine_steering(name: str, plan: Plan) -> list[Problem]:
    """List the problems of a plan for the kind of that name."""
    return [*_kind_named(name).examine(plan)]


def make_steering(parts: SteeringParts) -> list[Steering]:
    """All that steer a training."""
    made = (_kind_named(name).make(parts) for name in STEERINGS)
    return [one for one in made if one is not None]


def _kind_named(name: str) -> SteeringKind:
    """Make one. Raises ImportError, with its name, where its module cannot be imported."""
    try:
        return STEERINGS.get(name)()
    except ImportError as error:
        raise ImportError(f"steering '{name}' cannot be imported: {error}") from error

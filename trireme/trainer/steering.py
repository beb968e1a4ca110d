"""Steering: lets other code end a training, or request a checkpoint, while it runs.

Each kind is a class of the table STEERINGS. It is called without arguments, once to check a
configuration and once in the process of a trainer that is being made.
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
    """Receives each event of a training, which then reads its two attributes."""

    ended_by: str
    """The name and place of the code that ended the training, as a sentence; empty if none did."""
    saves: bool
    """Whether a checkpoint was requested. The trainer resets it when it saves one."""

    async def notify(self, event: str, step: int, **facts: Any) -> None:
        """Handle one of EVENTS; `step` train steps are done. The training waits for it."""
        ...


@dataclass(frozen=True)
class SteeringParts:
    """The parts of the training that is about to begin."""

    plan: Plan
    folder: JobFolder
    model: Any
    """The trained module."""
    broken_weights: Callable[[], Sequence[str]]
    """Returns the names of weights that are not finite."""
    emit: Emit


class SteeringKind(Protocol):
    """A kind of steering."""

    def examine(self, plan: Plan) -> Iterable[Problem]:
        """Yield the problems of a configuration. A ValueError or ImportError is a problem too."""
        ...

    def make(self, parts: SteeringParts) -> Steering | None:
        """Make the steering of this training; None if the configuration requests none."""
        ...


def examine_steering(name: str, plan: Plan) -> list[Problem]:
    """List the problems of a plan for the kind of that name."""
    return [*_kind_named(name).examine(plan)]


def make_steering(parts: SteeringParts) -> list[Steering]:
    """Make all steerings of a training."""
    made = (_kind_named(name).make(parts) for name in STEERINGS)
    return [one for one in made if one is not None]


def _kind_named(name: str) -> SteeringKind:
    """Make one. Raises ImportError or ValueError, with its name, if its module is not imported."""
    try:
        return STEERINGS.get(name)()
    except ImportError as error:
        raise ImportError(f"steering '{name}' cannot be imported: {error}") from error

"""Listeners: who follows a run from its start to its end, by names in manifests.

Each is a class of the table LISTENERS. It is called without arguments, once to examine a
configuration and once for each stage that runs, and decides by the configuration whether there is
anything to do. It runs in the process that starts the others, which hears what they all do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from trireme.config import Plan, Problem
from trireme.registry import LISTENERS

if TYPE_CHECKING:
    from trireme.launch.stage import Stage


class RunListener(Protocol):
    """Follows one run. A class that inherits from this one has to have `listen` alone.

    Its module is imported by every command that checks a configuration: what takes long to import
    is imported by `listen`.
    """

    def examine(self, plan: Plan) -> Iterable[Problem]:
        """What is wrong with a configuration. A ValueError or ImportError is a problem too."""
        return ()

    def begin(self, stage: Stage) -> None:
        """Look at a run that begins or resumes, before anything of an earlier start is changed.

        Raises ConfigError for a run that cannot be.
        """
        return None

    def listen(self, stage: Stage) -> None:
        """Subscribe to `stage.stream`, where the configuration asks for it."""
        ...

    def end(self) -> Sequence[dict[str, Any]]:
        """The warnings that the run's summary is to have; called when its work is done."""
        return ()


def listener_named(name: str) -> RunListener:
    """A new one. Raises ImportError, with its name, where its module cannot be imported."""
    try:
        return LISTENERS.get(name)()
    except ImportError as error:
        raise ImportError(f"listener '{name}' cannot be imported: {error}") from error


def examine_listener(name: str, plan: Plan) -> list[Problem]:
    """What is wrong with a plan for one of them."""
    return [*listener_named(name).examine(plan)]

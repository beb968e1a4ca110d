"""Listeners: the manifests' classes that follow a run from its start to its end.

Each is a class of the table LISTENERS. It is called without arguments, once to check a
configuration and once for each stage that runs, and decides by the configuration whether there is
anything to do. It runs in the launcher's process, which receives the events of all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from trireme.config import Plan, Problem
from trireme.registry import LISTENERS

if TYPE_CHECKING:
    from trireme.launch.stage import Stage


class RunListener(Protocol):
    """Follows one run. A subclass must implement `listen` alone.

    Its module is imported by every command that checks a configuration: import slow packages in
    `listen`.
    """

    def examine(self, plan: Plan) -> Iterable[Problem]:
        """Return the problems of a configuration. A ValueError or ImportError is a problem too."""
        return ()

    def begin(self, stage: Stage) -> None:
        """Inspect a run that begins or resumes, before anything of an earlier attempt is changed.

        Raises ConfigError if the run cannot be.
        """
        return None

    def listen(self, stage: Stage) -> None:
        """Subscribe to `stage.stream`, if the configuration asks for it."""
        ...

    def end(self) -> Sequence[dict[str, Any]]:
        """Return the warnings for the run's summary; called when its work is done."""
        return ()


def listeners() -> dict[str, RunListener]:
    """Make one of each, for one run; returns them by name. One whose module cannot be imported is
    left out with a warning.
    """
    return LISTENERS.make_all(anew=True)

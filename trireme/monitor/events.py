"""Events: what a run does, as frozen facts, and the one stream that carries them to its listeners.

- Each listener runs in a separate thread and receives all events from its subscription on, in the
  order in which they were emitted. There are no topics, and no order between listeners.
- A listener returns nothing. Requests that need an answer (stop, save now) are methods elsewhere.
- A listener that raises or hangs costs one warning, which names it, and never the run.
- `emit` returns when the listeners have handled the event, so that a step's line is written before
  its checkpoint is; it waits PATIENCE_S for one that hangs, and not at all for a tracker.
- Experiences in bulk (`Trained`, `Failures`, the rollouts of `Evaluated`) are delivered only in the
  process where they arise, and to no tracker. If a launcher spreads the parts over processes, all
  other events cross from the sides' streams to that of the run's process, encoded once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from trireme.log import get_logger
from trireme.text import storable

if TYPE_CHECKING:  # importing it would load torch before the thread settings are made
    from trireme.experience import Experience

logger = get_logger("launcher")

PATIENCE_S = 10.0
"""Seconds that `emit` waits for a hanging listener, once."""
CLOSE_S = 60.0
"""Seconds that a listener has at the end to write or send its backlog."""
MOST_BEHIND = 10_000
"""Events that may wait for a listener; one that falls further behind gets no more."""


@dataclass(frozen=True)
class Noted:
    """A message that people should read, as a line."""

    text: str


@dataclass(frozen=True)
class StepDone:
    """A finished step of one part of the run, explorer or trainer."""

    part: str
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Evaluated:
    """A finished evaluation of a taskset; `part` is eval or bench, the prefix of the metrics'
    names.
    """

    part: str
    step: int
    metrics: Mapping[str, float]
    rollouts: Sequence[Experience] = ()
    """All rollouts, in the process that ran them."""


@dataclass(frozen=True)
class RolloutDone:
    """A sample rollout of an explore step; one per step."""

    experience: Experience


@dataclass(frozen=True)
class Failures:
    """Failed rollouts as readable lines; in the process that ran them."""

    lines: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Trained:
    """The experiences of a train step; in the trainer's process, before its StepDone."""

    step: int
    experiences: Sequence[Experience]


@dataclass(frozen=True)
class Saved:
    """A finished checkpoint of a step."""

    step: int


@dataclass(frozen=True)
class Ended:
    """The last event. `failed`: the run was stopped, or ended with an error."""

    failed: bool = False
    error: str = ""
    """The sentence of the error, and its place in a line below; empty if there was none."""


Event = Noted | StepDone | Evaluated | RolloutDone | Failures | Trained | Saved | Ended
Emit = Callable[[Event], None]


class Listener(Protocol):
    """Follows the events of a run."""

    @property
    def name(self) -> str:
        """The name of the listener in a warning."""
        ...

    def hear(self, event: Event) -> None:
        """Handle an event, in the listener's own thread."""
        ...


def light(event: Event) -> Event | None:
    """Return the event without experiences in bulk; None if nothing is left."""
    if isinstance(event, Evaluated):
        return replace(event, rollouts=())
    return None if isinstance(event, Trained | Failures) else event


def measured(event: Event) -> tuple[dict[str, float], int, str] | None:
    """Return metrics, step and part of a step or an evaluation, with names that files and databases
    accept (rewards name some); None for another event.
    """
    if not isinstance(event, StepDone | Evaluated):
        return None
    metrics = {storable(name): value for name, value in event.metrics.items()}
    return metrics, event.step, event.part


class Stream:
    """The events of one run, or of one process of it."""

    def __init__(self) -> None:
        self._completing: list[tuple[Callable[[Event], Event], _Once]] = []
        self._listening: list[_Listening] = []

    def complete(self, name: str, add: Callable[[Event], Event]) -> None:
        """Register `add`, which completes each event before listeners receive it, such as with the
        watchdog's flags. Each `add` receives the result of the one before; warnings call it `name`.
        """
        self._completing.append((add, _Once(name)))

    def subscribe(
        self,
        listener: Listener,
        *,
        start: Callable[[], object] | None = None,
        awaited: bool = True,
        remark: str = "the run continues without it",
    ) -> None:
        """Deliver all events from now on to `listener`.

        `start` is called first in its thread; if it fails, the listener receives nothing. A
        listener that is not `awaited` delays nobody, however long it takes. `remark` ends the
        warning.
        """
        self._listening.append(_Listening(listener, awaited, remark))
        if start is not None:
            self._listening[-1].start(start)

    def emit(self, event: Event) -> None:
        """Send an event to every listener; from any thread."""
        for add, once in self._completing:
            try:
                event = add(event)
            except Exception as error:
                once.warn(f"failed: {type(error).__name__}: {error}")
        heard = [(each, each.put(event)) for each in self._listening]
        for each, done in heard:
            each.wait(done, event)

    def close(self, *, failed: bool = False, error: str = "") -> None:
        """Tell the listeners that the run has ended, and wait until all is written and sent.

        `error` is the sentence of the error with which it did.
        """
        listening, self._listening = self._listening, []
        for each in listening:
            each.put(Ended(failed, error))
            each.end()
        for each in listening:
            each.join()


class _Once:
    """Warns once about a listener's errors."""

    def __init__(self, name: str, remark: str = "the run continues without it") -> None:
        self._name, self._remark, self._warned = name, remark, False

    def warn(self, what: str) -> None:
        """Log the warning, unless one was logged for this listener before."""
        if not self._warned:
            self._warned = True
            logger.warning(f"{self._name} {what} ({self._remark})")


class _Listening:
    """A listener in its thread."""

    def __init__(self, listener: Listener, awaited: bool, remark: str) -> None:
        self._listener, self._awaited = listener, awaited
        self._once = _Once(listener.name, remark)
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._late = self._unusable = False
        self._thread = threading.Thread(
            target=self._work, name=f"listener-{listener.name}", daemon=True
        )
        self._thread.start()

    def start(self, call: Callable[[], object]) -> None:
        def start() -> None:
            try:
                call()
            except BaseException as error:  # SystemExit too: the thread must keep handling events
                self._unusable = True
                self._once.warn(f"could not start: {type(error).__name__}: {error}")

        self._calls.put(start)

    def put(self, event: Event) -> threading.Event:
        """Queue an event; the returned flag is set once it is handled."""
        done = threading.Event()
        taken = event if self._awaited else light(event)
        if self._calls.qsize() >= MOST_BEHIND:
            self._once.warn(f"is {MOST_BEHIND:,} events behind")
            taken = None
        if taken is None:
            done.set()
            return done

        def hear() -> None:
            try:
                if not self._unusable:
                    self._listener.hear(taken)
            except BaseException as error:
                closed = isinstance(error.__context__ or error, BrokenPipeError)  # rich exits
                text = f"failed: {type(error).__name__}: {error}"
                self._once.warn("stops, since its output is closed" if closed else text)
            finally:
                self._late = False
                done.set()

        self._calls.put(hear)
        return done

    def wait(self, done: threading.Event, event: Event) -> None:
        """Wait until the event is handled; not for a listener that hangs, or that hung before and
        has not returned since.
        """
        if self._awaited and not self._late and not done.wait(PATIENCE_S):
            self._late = True
            self._once.warn(f"has not taken a {type(event).__name__} within {PATIENCE_S:g} s")

    def end(self) -> None:
        """End the thread after the queued events."""
        self._calls.put(None)

    def join(self) -> None:
        """Wait until the thread has ended, at most CLOSE_S."""
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._once.warn(f"has not ended within {CLOSE_S:g} s")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

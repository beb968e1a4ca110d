"""Events: what a run does, as frozen facts, and the one stream that carries them to its listeners.

- Each listener has a thread of its own and hears all events from its subscription on, in the order
  in which they were emitted. There are no topics, and no order between listeners.
- A listener answers nothing. What must be answered (stop, save now) is a method elsewhere.
- A listener that raises or hangs costs one warning, which names it, and never the run.
- `emit` returns when the listeners have heard the event, so that a step's line is written before
  its checkpoint is; it waits PATIENCE_S for one that hangs, and not at all for a tracker.
- Experiences in bulk (`Trained`, `Failures`, the rollouts of `Evaluated`) are heard in the process
  where they arise, and by no tracker. Where a launcher spreads the parts, all else
  crosses from the sides' streams to that of the run's process, encoded once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from trireme.log import get_logger
from trireme.text import storable

if TYPE_CHECKING:  # at run time it would load torch before the threads' settings are made
    from trireme.experience import Experience

logger = get_logger("launcher")

PATIENCE_S = 10.0
"""Seconds that `emit` waits for a listener that hangs, once."""
CLOSE_S = 60.0
"""Seconds that a listener has at the end to write or send what it holds."""
MOST_BEHIND = 10_000
"""Events that may wait for a listener; one that is further behind hears no more of them."""


@dataclass(frozen=True)
class Noted:
    """Something that people want to read, as a line."""

    text: str


@dataclass(frozen=True)
class StepDone:
    """A part of the run, explorer or trainer, has done a step."""

    part: str
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Evaluated:
    """An evaluation taskset was tried; `part` is eval or bench, which metrics' names begin with."""

    part: str
    step: int
    metrics: Mapping[str, float]
    rollouts: Sequence[Experience] = ()
    """All of them, in the process that tried them."""


@dataclass(frozen=True)
class RolloutDone:
    """A rollout of an explore step, to look at: one of each step."""

    experience: Experience


@dataclass(frozen=True)
class Failures:
    """Rollouts that failed, as lines for people; in the process that tried them."""

    lines: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Trained:
    """What a train step learned from; in the trainer's process, before its StepDone."""

    step: int
    experiences: Sequence[Experience]


@dataclass(frozen=True)
class Saved:
    """The checkpoint of a step is whole."""

    step: int


@dataclass(frozen=True)
class Ended:
    """The last event. `failed`: the run was stopped, or ended with an error."""

    failed: bool = False


Event = Noted | StepDone | Evaluated | RolloutDone | Failures | Trained | Saved | Ended
Emit = Callable[[Event], None]


class Listener(Protocol):
    """Hears what a run does."""

    @property
    def name(self) -> str:
        """By which a warning speaks of it."""
        ...

    def hear(self, event: Event) -> None:
        """Take note of an event, in a thread of the listener's own."""
        ...


def light(event: Event) -> Event | None:
    """An event without experiences in bulk; None where nothing is left."""
    if isinstance(event, Evaluated):
        return replace(event, rollouts=())
    return None if isinstance(event, Trained | Failures) else event


def measured(event: Event) -> tuple[dict[str, float], int, str] | None:
    """Metrics, step and part of a step or an evaluation, with names as files and databases take
    them (rewards name some); None for another event.
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
        """Have `add` put into each event, before it is heard, what belongs to it: the watchdog's
        flags, say. One gets what the one before it returned; warnings call it `name`.
        """
        self._completing.append((add, _Once(name)))

    def subscribe(
        self,
        listener: Listener,
        *,
        start: Callable[[], object] | None = None,
        awaited: bool = True,
        remark: str = "the run goes on without it",
    ) -> None:
        """Have `listener` hear what is emitted from now on.

        `start` is called first in its thread; one that cannot start hears nothing. One that is not
        `awaited` holds up nobody, however long it takes. `remark` ends the warning.
        """
        self._listening.append(_Listening(listener, awaited, remark))
        if start is not None:
            self._listening[-1].start(start)

    def emit(self, event: Event) -> None:
        """Tell every listener; from any thread."""
        for add, once in self._completing:
            try:
                event = add(event)
            except Exception as error:
                once.warn(f"failed: {type(error).__name__}: {error}")
        heard = [(each, each.put(event)) for each in self._listening]
        for each, done in heard:
            each.wait(done, event)

    def close(self, *, failed: bool = False) -> None:
        """Tell the listeners that the run has ended, and wait until all is written and sent."""
        listening, self._listening = self._listening, []
        for each in listening:
            each.put(Ended(failed))
            each.end()
        for each in listening:
            each.join()


class _Once:
    """Warns once of what goes wrong with a listener."""

    def __init__(self, name: str, remark: str = "the run goes on without it") -> None:
        self._name, self._remark, self._warned = name, remark, False

    def warn(self, what: str) -> None:
        """Say it, if nothing was said of this listener yet."""
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
            except BaseException as error:  # SystemExit too: the thread has others to serve
                self._unusable = True
                self._once.warn(f"could not start: {type(error).__name__}: {error}")

        self._calls.put(start)

    def put(self, event: Event) -> threading.Event:
        """Hand an event over; what is returned is set once it was heard."""
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
                self._once.warn(f"failed: {type(error).__name__}: {error}")
            finally:
                self._late = False
                done.set()

        self._calls.put(hear)
        return done

    def wait(self, done: threading.Event, event: Event) -> None:
        """Until the event was heard, but for a listener that hangs, or hung when it was last asked
        and has not returned since.
        """
        if self._awaited and not self._late and not done.wait(PATIENCE_S):
            self._late = True
            self._once.warn(f"has not taken a {type(event).__name__} within {PATIENCE_S:g} s")

    def end(self) -> None:
        """End the thread after what it was given."""
        self._calls.put(None)

    def join(self) -> None:
        """Until the thread has ended, up to CLOSE_S."""
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._once.warn(f"has not ended within {CLOSE_S:g} s")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

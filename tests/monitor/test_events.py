"""Listeners hear all that a run does, in order; one that raises or hangs costs one warning."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.limits import HANG_S
from trireme.experience import EID, Experience
from trireme.monitor import events
from trireme.monitor.console import Console
from trireme.monitor.events import (
    Ended,
    Evaluated,
    Event,
    Failures,
    Noted,
    RolloutDone,
    StepDone,
    Stream,
    Trained,
)
from trireme.monitor.terminal import Terminal


class Ear:
    """A listener that keeps what it hears, or does something else."""

    def __init__(self, name: str, does: Callable[[Event], Any] | None = None) -> None:
        self.name = name
        self.heard: list[Event] = []
        self._does = does or self.heard.append

    def hear(self, event: Event) -> None:
        self._does(event)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


STEPS = [StepDone("trainer", step, {"x": 1.0}) for step in (1, 2, 3)]


def test_each_listener_hears_every_event_in_order_before_emit_returns() -> None:
    stream, first, second = Stream(), Ear("first"), Ear("second")
    stream.subscribe(first)
    stream.emit(STEPS[0])
    stream.subscribe(second)
    stream.emit(STEPS[1])
    assert first.heard == STEPS[:2] and second.heard == STEPS[1:2]
    stream.close(failed=True, error="no route")
    assert second.heard[1:] == [Ended(failed=True, error="no route")]


@pytest.mark.parametrize("error", [RuntimeError("no route"), SystemExit("no route")])
def test_a_listener_that_raises_costs_one_warning_that_names_it(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def raises(event: Event) -> None:
        raise error

    stream, other = Stream(), Ear("other")
    stream.subscribe(Ear("the board", raises))
    stream.subscribe(other)
    for step in STEPS:
        stream.emit(step)
    stream.close()
    assert other.heard == [*STEPS, Ended()]
    kind = type(error).__name__
    assert warnings(caplog) == [
        f"the board failed: {kind}: no route (the run continues without it)"
    ]


def test_a_console_whose_output_is_closed_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def exits(event: Event) -> None:  # as rich does
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904

    stream = Stream()
    stream.subscribe(Ear("the console", exits))
    stream.emit(STEPS[0])
    stream.close()
    said = "the console stops, since its output is closed (the run continues without it)"
    assert warnings(caplog) == [said]


def test_a_listener_that_hangs_costs_one_warning_that_names_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PATIENCE_S", 0.05)
    monkeypatch.setattr(events, "CLOSE_S", 0.05)
    released, other = threading.Event(), Ear("other")
    heard: list[Event] = []

    def hangs(event: Event) -> None:
        released.wait(HANG_S)
        heard.append(event)

    stream = Stream()
    stream.subscribe(Ear("the board", hangs))
    stream.subscribe(other)
    for step in STEPS:
        stream.emit(step)
    assert other.heard == STEPS and not heard
    stream.close()
    [warning] = warnings(caplog)
    assert warning.startswith("the board has not taken a StepDone within 0.05 s")
    released.set()


def test_one_that_is_not_waited_for_holds_up_nobody_and_gets_no_experiences_in_bulk() -> None:
    released, ended = threading.Event(), threading.Event()
    heard: list[Event] = []

    def slow(event: Event) -> None:
        released.wait(HANG_S)
        heard.append(event)
        if isinstance(event, Ended):
            ended.set()

    stream = Stream()
    stream.subscribe(Ear("slow", slow), awaited=False)
    rollout = Experience([1, 2, 3], prompt_length=1, eid=EID(1, 2))
    for event in (Trained(1, [rollout]), Evaluated("eval", 1, {"x": 1.0}, [rollout]), *STEPS):
        stream.emit(event)
    stream.emit(Failures([{"eid": "1/0/0/0", "step": 1}]))
    assert not heard
    released.set()
    stream.close()
    assert ended.wait(HANG_S) and heard == [Evaluated("eval", 1, {"x": 1.0}), *STEPS, Ended()]


def test_what_completes_an_event_is_no_danger_to_the_run_either(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(event: Event) -> Event:
        raise ZeroDivisionError("division by zero")

    stream, ear = Stream(), Ear("ear")
    stream.subscribe(ear)
    stream.complete("the watchdog", fails)
    for step in STEPS:
        stream.emit(step)
    stream.close()
    assert ear.heard == [*STEPS, Ended()]
    [warning] = warnings(caplog)
    assert warning.startswith("the watchdog failed: ZeroDivisionError")


def test_several_complete_an_event_one_after_the_other() -> None:
    def adds(letter: str) -> Callable[[Event], Event]:
        return lambda event: Noted(event.text + letter) if isinstance(event, Noted) else event

    stream, ear = Stream(), Ear("ear")
    stream.complete("the first", adds("a"))
    stream.complete("the second", adds("b"))
    stream.subscribe(ear)
    stream.emit(Noted(""))
    stream.close()
    assert ear.heard == [Noted("ab"), Ended()]


def test_the_console_prints_of_a_stream_what_it_prints_when_it_is_called() -> None:
    rollout = Experience(
        [1, 2, 3], prompt_length=1, eid=EID(1, 2), reward=0.5, prompt_text="2 + 2?",
        response_text="four",
    )  # fmt: skip
    metrics = {"eval/held_out/accuracy/mean@1": 0.25, "eval/held_out/tasks": 4.0}

    def console() -> Console:
        output = Terminal(file=io.StringIO(), width=200)
        return Console(live=False, output=output, every=0.0, clock=lambda: 7.0)

    called, hearing, stream = console(), console(), Stream()
    called.note("begins")
    called.step("eval", 0, metrics)
    called.step("trainer", 1, {"actor/grad_norm": 0.5})
    called.rollout(rollout)
    stream.subscribe(hearing)
    stream.emit(Noted("begins"))
    stream.emit(Evaluated("eval", 0, metrics, [rollout]))
    stream.emit(StepDone("trainer", 1, {"actor/grad_norm": 0.5}))
    stream.emit(RolloutDone(rollout))
    stream.close()

    def printed(console: Console) -> str:
        assert isinstance(console.output.file, io.StringIO)
        return console.output.file.getvalue()

    assert printed(hearing) == printed(called) and "evaluation held_out" in printed(called)

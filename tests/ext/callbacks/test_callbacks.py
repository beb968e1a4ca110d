"""Callbacks: users' classes are told of a training's events, and may end it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.limits import HANG_S
from tests.trainer.test_trainer import saves, trained
from trireme.ext.callbacks.callbacks import Callbacks, examine_callbacks
from trireme.registry import CALLBACKS
from trireme.sync.probe import BrokenWeights
from trireme.usercode import fault_of, innermost

SEEN: list[str] = []
ARGS = {"max_steps": 9, "output_dir": "jobs/a"}


class Ends(TrainerCallback):
    """As transformers has them: made without arguments."""

    def __init__(self, at: int = 3) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        SEEN.append(f"end {state.global_step} of {args.max_steps}")
        control.should_save = state.global_step == 1
        control.should_training_stop = state.global_step >= self.at
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        SEEN.append(f"saved {state.global_step}")


class Told:
    """As ms-swift has them: made with the arguments and the trainer."""

    def __init__(self, args: Any, trainer: Any) -> None:
        self.trainer = trainer
        SEEN.append(f"made for {args.output_dir}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        SEEN.append(f"begin {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        assert state is self.trainer.state and kwargs["model"] == "the model"
        SEEN.append(f"log {len(state.log_history)}: {logs['actor/lr']}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        SEEN.append(f"over at {state.global_step}")


class Fails:
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise LookupError("no step")


class Evaluates:
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = True


class Misspells:
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_stop_training = True


class Agrees:
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> bool:
        return True


class Logs(TrainerCallback):
    on_gpu = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = True
        SEEN.append("logs")


class EndsAtOnce(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


class Waits(TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


KINDS = {"ends": Ends, "told": Told, "fails": Fails, "evaluates": Evaluates, "waits": Waits}
KINDS |= {"misspells": Misspells, "agrees": Agrees, "logs": Logs, "at_once": EndsAtOnce}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    SEEN.clear()
    more = {"hangs": Hangs, "breaks": Breaks}
    for name, kind in (KINDS | more | {"nothing": TrainerCallback, "number": 3}).items():
        monkeypatch.setitem(CALLBACKS._registered, name, kind)
    yield


def test_they_are_called_in_order_and_end_the_training_with_a_checkpoint() -> None:
    def callbacks() -> Callbacks:
        return Callbacks(["told", "ends"], ARGS, "the model")

    made = trained(20, total_steps=9, save_behind=False, steering=[callbacks()])
    assert made.trainer.step == 3 and made.events[-1] == "stopped 3"
    assert saves(made) == ["save 1, 18 left", "save 3, 14 left, the last"]
    assert [
        *("made for jobs/a", "begin 0"),
        *("end 1 of 9", "log 1: 0.1", "saved 1"),
        *("end 2 of 9", "log 2: 0.1"),
        *("end 3 of 9", "log 3: 0.1", "saved 3", "over at 3"),
    ] == SEEN


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("fails", LookupError, "no step"),
        ("evaluates", ValueError, "'evaluates' set control.should_evaluate, which has no effect"),
        ("misspells", ValueError, "'misspells' set control.should_stop_training, which has no"),
        ("agrees", ValueError, "'agrees' returned True from on_step_end: expected control, or n"),
        ("at_once", RuntimeError, "no train step was made: .*'at_once' ended the training in on_t"),
    ],
)
def test_what_fails_in_one_ends_the_run(name: str, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        trained(4, steering=[Callbacks([name], ARGS, None)])
    if error is not RuntimeError:
        assert str(fault_of(raised.value)).startswith(f"trainer.callbacks '{name}'")


def test_who_ended_the_training_is_kept_and_a_step_is_logged_anyway() -> None:
    examine_callbacks(["logs"])
    made = trained(20, total_steps=9, steering=[Callbacks(["logs", "ends"], ARGS, None)])
    assert made.trainer.ended_by == (
        "trainer.callbacks 'ends' ended the training in on_step_end, at step 3"
    )
    assert SEEN.count("logs") == 3
    assert trained(4, steering=[Callbacks(["logs"], ARGS, None)]).trainer.ended_by == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "waits",
            "'waits' has on_evaluate, an event that never occurs here: expected on_init_end, on_t",
        ),
        ("nothing", "'nothing' has none of on_init_end"),
        ("number", "'number' is 3: expected a class"),
        ("early_stop", "'early_stop' is one of ms-swift's own"),
        ("tolt", "did you mean 'told'"),
    ],
)
def test_what_could_never_be_called_is_refused_before_the_run(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        examine_callbacks(["told", name])
    examine_callbacks(["told", "ends"])


class Hangs(TrainerCallback):
    released = threading.Event()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.released.wait(HANG_S)


class Steps:
    """A clock whose time passes when `Hangs` is at its place."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        while not any(line.endswith("self.released.wait(HANG_S)") for line in self._lines()):
            await asyncio.sleep(0.01)
        self.slept.append(seconds)

    def _lines(self) -> list[str]:
        return [innermost(frame)[1] for frame in sys._current_frames().values()]


def test_one_that_hangs_is_noted_with_its_place_and_ends_the_training() -> None:
    clock, notes = Steps(), list[Any]()
    callbacks = Callbacks(["hangs"], ARGS, None, timeout=100, clock=clock, emit=notes.append)
    try:
        with pytest.raises(TimeoutError) as caught:
            trained(4, steering=[callbacks])
    finally:
        Hangs.released.set()
    note = notes.pop().text
    assert not notes
    whose, place = "trainer.callbacks 'hangs'", "self.released.wait(HANG_S)"
    limit = "(at most 100 s: trainer.callbacks_timeout)"
    assert note.startswith(
        f"{whose} has been in on_step_end for 30 s, and the training waits for it {limit}\n"
    )
    first = f"{whose} did not return from on_step_end in 100 s (trainer.callbacks_timeout)\n"
    assert str(caught.value).startswith(first)
    assert all(
        f"{__file__}:" in text and text.endswith(place) for text in (note, str(caught.value))
    )
    assert clock.slept == [30, 70]


class Breaks(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            model.weight.data[0, 0] = float("nan")


def test_one_that_breaks_the_weights_is_named_with_the_event_and_the_weight() -> None:
    model = torch.nn.Linear(2, 2)

    def broken() -> list[str]:
        named = model.named_parameters()
        return [name for name, weight in named if not bool(weight.isfinite().all())]

    with pytest.raises(ValueError, match="an infinite number from on_step_end, with 2") as caught:
        trained(9, steering=[Callbacks(["breaks"], ARGS, model, broken_weights=broken)])
    assert str(fault_of(caught.value)).startswith(
        "trainer.callbacks 'breaks' left weights that hold NaN or an infinite number from "
        "on_step_end, with 2 train steps done: weight"
    )


def test_weights_that_a_train_step_broke_are_not_a_callbacks_fault() -> None:
    callbacks = Callbacks(["ends"], ARGS, None, broken_weights=lambda: ["a"])
    with pytest.raises(BrokenWeights, match=r"infinite number since train step 1 \(a\)"):
        trained(9, steering=[callbacks])
    assert not SEEN


def test_without_callbacks_nothing_is_made() -> None:
    nobody = Callbacks((), {}, None)
    asyncio.run(nobody.notify("on_step_end", 1))
    assert not nobody.stops and not nobody._made

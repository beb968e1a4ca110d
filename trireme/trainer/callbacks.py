"""Callbacks: tells users' objects of a training's events, by transformers' names for them.

- They are made as `kind(args, trainer)` (ms-swift's), or as `kind()`.
- `control.should_training_stop` ends the training after a checkpoint, as if its steps were done;
  `should_save` asks for a checkpoint. What else a control may ask for is refused.
- An event that has no counterpart here is refused before the run: it would never come.
- They are called in order, away from the event loop, on rank 0 alone. Nothing of them is saved.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from trireme.aio import in_thread
from trireme.log import get_logger
from trireme.registry import CALLBACKS
from trireme.usercode import UserCode

EVENTS = ("on_init_end", "on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_save")
EVENTS += ("on_train_end",)
logger = get_logger("trainer")
_UNREAD = ("should_epoch_stop", "should_evaluate")


def examine_callbacks(names: Sequence[str]) -> None:
    """Raise ValueError for a callback that is not there, or that waits for what never happens."""
    for name in names:
        kind = CALLBACKS.get(name)
        whose = f"trainer.callbacks '{name}'"
        if not inspect.isclass(kind):
            raise ValueError(
                f"{whose} is {kind!r:.60}: expected a class with methods such as on_log"
            )
        own = [event for event in dir(kind) if event.startswith("on_") and _own(kind, event)]
        if never := [event for event in own if event not in EVENTS]:
            raise ValueError(
                f"{whose} has {never[0]}, which never happens here: expected {', '.join(EVENTS)}"
            )
        if not own:
            raise ValueError(f"{whose} has none of {', '.join(EVENTS)}: expected one at least")


def _own(kind: type, event: str) -> bool:
    """Whether a class, or a base of it that is not transformers', has the method."""
    where = next(base for base in kind.__mro__ if event in vars(base))
    return not where.__module__.startswith(("transformers.", "trireme."))


class Callbacks:
    """Those of one training, and what they have asked for."""

    def __init__(self, names: Sequence[str], args: Mapping[str, Any], model: Any) -> None:
        """`args`: what they read as attributes of `args`."""
        self.stops = False
        """One of them has said that the training is to end."""
        self.saves = False
        """One of them has asked for a checkpoint, since this was last set to False."""
        self._names, self._args, self._model = list(names), SimpleNamespace(**args), model
        self._made: list[tuple[str, Any]] = []
        self._lock = asyncio.Lock()

    async def tell(self, event: str, step: int, **told: Any) -> None:
        """Call those that have this event; `step` train steps are done."""
        if self._names:
            async with self._lock:
                await in_thread(lambda: self._tell(event, step, told), name="callbacks")

    def _tell(self, event: str, step: int, told: Mapping[str, Any]) -> None:
        if not self._made:
            self._make()
        self._state.global_step = step
        if event == "on_log":
            self._state.log_history.append({**told["logs"], "step": step})
        for name, callback in self._made:
            method = getattr(callback, event, None)
            if method is None:
                continue
            whose = f"trainer.callbacks '{name}'"
            with UserCode(whose, method):
                returned = method(self._args, self._state, self._control, model=self._model, **told)
            control = self._control if returned is None else returned
            if odd := next((flag for flag in _UNREAD if getattr(control, flag, False)), None):
                raise ValueError(
                    f"{whose} set control.{odd}, which nothing here reads: expected "
                    "should_training_stop or should_save"
                )
            if control.should_training_stop and not self.stops:
                logger.info("%s ends the training after step %d", whose, step)
            self.stops = self.stops or control.should_training_stop
            self.saves = self.saves or control.should_save
            self._control.should_save = False

    def _make(self) -> None:
        from transformers.trainer_callback import TrainerControl, TrainerState

        self._state = TrainerState(max_steps=self._args.max_steps)
        self._control = TrainerControl()
        trainer = SimpleNamespace(
            args=self._args, state=self._state, control=self._control, model=self._model
        )
        for name in self._names:
            kind = CALLBACKS.get(name)
            takes = inspect.signature(kind).parameters.values()
            bare = not any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in takes)
            with UserCode(f"trainer.callbacks '{name}'", kind):
                self._made.append((name, kind() if bare else kind(self._args, trainer)))

"""Callbacks: calls users' objects at a training's events, under transformers' names for them.

- They are made as `kind(args, trainer)` (ms-swift's), or as `kind()`.
- `control.should_training_stop` ends the training after a checkpoint, as if its steps were done;
  `should_save` requests a checkpoint; `should_log` changes nothing, since each step is logged.
  Other requests of a control are refused.
- An event without a counterpart here is refused before the run: it would never occur.
- They are called in order, off the event loop, on rank 0 only. Their state is not saved.
- One that does not return is reported with its place, and ends the training after a limit; so does
  one that leaves weights that are not finite.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from trireme.aio import in_thread, running
from trireme.buffer.buffer import Clock, WallClock
from trireme.config import Plan
from trireme.log import get_logger
from trireme.monitor.events import Emit, Noted
from trireme.registry import CALLBACKS
from trireme.sync.probe import BrokenWeights, a_few
from trireme.trainer.steering import EVENTS, SteeringParts
from trireme.usercode import Refused, UserCode, innermost, with_place

NOTED = 30.0
"""Seconds after which a line names the callback that the training waits for."""
logger = get_logger("trainer")
_FLAGS = ("should_training_stop", "should_save", "should_log")


class CallbackSteering:
    """Has the classes that `trainer.callbacks` names steer a training: see SteeringKind."""

    def examine(self, plan: Plan) -> tuple[()]:
        """Raise ValueError for a class that cannot be called."""
        examine_callbacks(plan.config.trainer.callbacks)
        return ()

    def make(self, parts: SteeringParts) -> Callbacks | None:
        """Make the callbacks; None if the configuration names none."""
        plan, trainer = parts.plan, parts.plan.config.trainer
        args = {
            "output_dir": str(parts.folder.root),
            "max_steps": trainer.total_steps or plan.steps.train or -1,
            "save_steps": trainer.save_interval,
            "logging_steps": 1,
            "learning_rate": plan.config.algorithm.optimizer.lr,
            "seed": plan.config.seed,
        }
        if not trainer.callbacks:
            return None
        return Callbacks(
            trainer.callbacks,
            args,
            parts.model,
            timeout=trainer.callbacks_timeout,
            broken_weights=parts.broken_weights,
            emit=parts.emit,
        )


def examine_callbacks(names: Sequence[str]) -> None:
    """Raise ValueError for a callback that does not exist, or that waits for an event that never
    occurs.
    """
    for name in names:
        kind = CALLBACKS.get(name)
        whose = f"trainer.callbacks '{name}'"
        if not inspect.isclass(kind):
            raise ValueError(
                f"{whose} is {kind!r:.60}: expected a class with methods such as on_log"
            )
        own = [name for name in dir(kind) if name.startswith("on_") and _own(kind, name)]
        if never := [event for event in own if event not in EVENTS]:
            raise ValueError(
                f"{whose} has {never[0]}, an event that never occurs here: expected "
                f"{', '.join(EVENTS)}"
            )
        if not own:
            raise ValueError(f"{whose} has none of {', '.join(EVENTS)}: expected at least one")


def _own(kind: type, name: str) -> bool:
    """Return whether a class, or a base of it that is not transformers', has a method
    of this name.
    """
    where = next(base for base in kind.__mro__ if name in vars(base))
    theirs = where.__module__.startswith(("transformers.", "trireme."))
    return callable(getattr(kind, name)) and not theirs


def _takes_arguments(kind: type) -> bool:
    """Return whether a class is made as ms-swift's are; a constructor with `*args` passes them to a
    base's, which then decides.
    """
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        takes = [*inspect.signature(vars(base)["__init__"]).parameters.values()][1:]
        if not takes or takes[0].kind > inspect.Parameter.VAR_POSITIONAL:
            return False
        if (first := takes[0]).kind is not inspect.Parameter.VAR_POSITIONAL:
            return first.default is first.empty or (first.name == "args" and len(takes) > 1)
    return False


class Callbacks:
    """The callbacks of one training, and what they have requested."""

    def __init__(
        self,
        names: Sequence[str],
        args: Mapping[str, Any],
        model: Any,
        *,
        timeout: float = math.inf,
        broken_weights: Callable[[], Sequence[str]] = tuple,
        emit: Emit = lambda event: None,
        clock: Clock | None = None,
    ) -> None:
        """`args`: the attributes of the `args` that they receive. An event may take `timeout`
        seconds.

        `broken_weights` returns the names of weights that are not finite.
        """
        self.ended_by = ""
        """The callback that ended the training, and its place, as a sentence."""
        self.saves = False
        """Whether a callback has requested a checkpoint since this was last reset."""
        self._names, self._args, self._model = list(names), SimpleNamespace(**args), model
        self._made: list[tuple[str, Any]] = []
        self._timeout, self._broken_weights, self._emit = timeout, broken_weights, emit
        self._clock = clock or WallClock()
        self._thread = 0
        """The ident of the one that an event's calls are made in."""
        self._lock = asyncio.Lock()

    @property
    def stops(self) -> bool:
        """True if a callback has ended the training."""
        return bool(self.ended_by)

    async def notify(self, event: str, step: int, **told: Any) -> None:
        """Call those that have this event; `step` train steps are done.

        Raises TimeoutError with the place of one that does not return.
        """
        if not self._names:
            return
        async with self._lock:
            call = in_thread(partial(self._tell, event, step, told), name="callbacks")
            async with running(call, self._watch(event)) as (calling, watching):
                await asyncio.wait({calling, watching}, return_when=asyncio.FIRST_COMPLETED)
                (calling if calling.done() else watching).result()

    async def _watch(self, event: str) -> None:
        """Report a callback that takes long. Raises TimeoutError if it takes too long."""
        if self._timeout > NOTED:
            await self._clock.sleep(NOTED)
            whose, line = self._place()
            most = f" (at most {self._timeout:g} s: trainer.callbacks_timeout)"
            text = f"{whose} has been in {event} for {NOTED:g} s, and the training waits for it"
            self._emit(Noted(with_place(text + most * math.isfinite(self._timeout), line)))
        await self._clock.sleep(self._timeout - NOTED * (self._timeout > NOTED))
        whose, line = self._place()
        limit = f"in {self._timeout:g} s (trainer.callbacks_timeout)"
        raise TimeoutError(with_place(f"{whose} did not return from {event} {limit}", line))

    def _place(self) -> tuple[str, str]:
        """Return the running callback, and its current line."""
        part, line = innermost(sys._current_frames().get(self._thread))
        return part.what if part else "trainer.callbacks", line

    def _tell(self, event: str, step: int, told: Mapping[str, Any]) -> None:
        self._thread = threading.get_ident()
        if not self._made:
            self._make()
        if event == "on_step_end" and (broken := self._broken_weights()):
            raise BrokenWeights(a_few(broken), f" since train step {step}")  # the optimizer's doing
        self._state.global_step = step
        if event == "on_log":
            self._state.log_history.append({**told["logs"], "step": step})
        for name, callback in self._made:
            method = getattr(callback, event, None)
            if not callable(method):
                continue
            whose = f"trainer.callbacks '{name}'"
            with UserCode(whose, method) as _:
                returned = method(self._args, self._state, self._control, model=self._model, **told)
                control = self._examined(returned, whose, event)
                if _own(type(callback), event) and (broken := self._broken_weights()):
                    raise Refused(
                        f"{whose} left weights that hold NaN or an infinite number from {event}, "
                        f"with {step} train steps done: {a_few(broken)}"
                    )
            if control.should_training_stop and not self.stops:
                self.ended_by = f"{whose} ended the training in {event}, at step {step}"
                logger.info("%s", self.ended_by)
            self.saves = self.saves or bool(control.should_save)
            self._control.should_save = False

    def _examined(self, returned: Any, whose: str, event: str) -> Any:
        """Return what a callback requests, by the control that it received or by one that it
        returned.

        Raises Refused for anything but a control, and for a flag that has no effect here.
        """
        control = self._control if returned is None else returned
        if not isinstance(control, type(self._control)):
            raise Refused(
                f"{whose} returned {returned!r:.60} from {event}: expected control, or nothing"
            )
        flags = (
            flag for flag, value in vars(control).items() if flag.startswith("should_") and value
        )
        if odd := next((flag for flag in flags if flag not in _FLAGS), None):
            raise Refused(
                f"{whose} set control.{odd}, which has no effect here: expected "
                "should_training_stop or should_save"
            )
        return control

    def _make(self) -> None:
        from transformers.trainer_callback import TrainerControl, TrainerState

        self._state = TrainerState(max_steps=self._args.max_steps)
        self._control = TrainerControl()
        trainer = SimpleNamespace(
            args=self._args, state=self._state, control=self._control, model=self._model
        )
        for name in self._names:
            kind = CALLBACKS.get(name)
            given = (self._args, trainer) if _takes_arguments(kind) else ()
            with UserCode(f"trainer.callbacks '{name}'", kind) as _:
                self._made.append((name, kind(*given)))

"""Swift callback: the base class of ms-swift's callbacks, loaded when a plug-in asks for it."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import TrainerCallback as _TrainerCallback


class TrainerCallback(_TrainerCallback):
    """Base of callbacks, whose constructor takes ms-swift's arguments; transformers' events are
    there for `super()`, and do nothing.
    """

    def __init__(self, args: Any, trainer: Any) -> None:
        self.args, self.trainer = args, trainer

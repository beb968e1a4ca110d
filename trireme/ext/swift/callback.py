"""Swift callback: the base class of ms-swift's callbacks, imported when a plug-in needs it."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import TrainerCallback as _TrainerCallback


class TrainerCallback(_TrainerCallback):
    """The base of callbacks, whose constructor takes ms-swift's arguments; transformers' events
    exist for `super()`, and do nothing.
    """

    def __init__(self, args: Any, trainer: Any) -> None:
        self.args, self.trainer = args, trainer

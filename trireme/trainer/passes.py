"""Passes: the door for passes over a micro-batch that are faster than transformers' module.

A function of TRAINING_PASSES, `(model) -> TrainingPass | None`, makes one, if it suits the model.
It stands in for the language model's own forward, whose hooks stay, and decides for each
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from trireme.engines.torch.composite import text_model
from trireme.registry import TRAINING_PASSES
from trireme.trainer.pack import PackedBatch

TrainingPass = Callable[[Any, PackedBatch], "Tensor | None"]
"""Computes the last hidden states [T, W] of a micro-batch by the weights of a language model (the
module is given), with gradients if they are enabled; None if it does not compute this one."""


def hasten(model: PreTrainedModel) -> None:
    """Let a language model compute micro-batches by the first pass that suits it."""
    compute = next(filter(None, (make(model) for make in TRAINING_PASSES.values())), None)
    if compute is not None:
        text = text_model(model)
        # bound, so that a copy of the module computes by its own weights
        text.forward = MethodType(_first_by(compute), text)


def _first_by(compute: TrainingPass) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, packed: PackedBatch | None = None, **options: Any) -> Any:
        hidden = None if packed is None else compute(self, packed)
        if hidden is None:
            return type(self).forward(self, *args, packed=packed, **options)
        return BaseModelOutput(last_hidden_state=hidden[None])

    return forward

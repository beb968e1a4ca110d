"""The door for faster passes: the first that suits a model computes, or leaves it to the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trireme.batch import of_tokens
from trireme.engines.torch.composite import text_model
from trireme.registry import TRAINING_PASSES
from trireme.trainer.model import hidden_states, load_model
from trireme.trainer.pack import PackedBatch, pack_for


class Ones:
    """Computes rows of one token."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, base: Any, packed: PackedBatch) -> Tensor | None:
        return base.embed_tokens(packed.tokens) * 0 + 1 if len(packed.tokens) == 1 else None


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {"none": lambda _: None, "ones": Ones, "never": _never}
    monkeypatch.setattr(TRAINING_PASSES, "values", made.values)


def _never(_: PreTrainedModel) -> None:
    raise AssertionError("another one suits the model")


@pytest.mark.usefixtures("registered")
def test_the_first_pass_that_suits_computes_what_it_can(tiny_dir):
    model = load_model(tiny_dir, device="cpu")
    seen: list[int] = []
    text_model(model).register_forward_pre_hook(
        lambda _, __, options: seen.append(len(options["packed"].tokens)), with_kwargs=True
    )
    lone, row = (
        pack_for(model, torch.device("cpu"), of_tokens([ids])) for ids in ([5, 6], [5, 6, 7])
    )
    assert torch.equal(hidden_states(model, lone), torch.ones(1, 32))
    own = hidden_states(model, row)
    assert own.shape == (2, 32) and not torch.equal(own, torch.ones(2, 32))
    assert seen == [1, 2]  # the module's hooks stay
    plain = text_model(model)(input_ids=torch.tensor([[5, 6]]), use_cache=False, packed=row)
    assert torch.equal(plain.last_hidden_state[0], own)

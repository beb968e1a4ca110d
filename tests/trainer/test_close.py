"""Close: do two computations of a model's log-probabilities differ by rounding alone?

The GPU's tests ask `distance` and `outside_top`; here both are seen to tell rounding from a wrong
prompt and from a train step. A model as made has nearly equal logits, and a wrong prompt moves its
log-probabilities less than bfloat16 may; so its head is made large, and the limit is relative.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny import make_model
from tests.trainer.samples import VOCABULARY, backend_of, experiences
from trireme.algorithms.recipes import get_recipe
from trireme.trainer.backend import Backend
from trireme.trainer.step import train_step

LIMIT = 0.03
"""Rounding to bfloat16 gives 0.005 to 0.008, a train step 0.08, a prompt's first token 0.19."""


def large_head(folder: Path) -> Path:
    """A tiny model whose log-probabilities spread over some 7 nats, as a trained model's do."""
    make_model(folder, tie=False)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(60)
    model.save_pretrained(folder)
    return folder


def distance(found: Sequence[float], expected: Sequence[float]) -> float:
    """The root mean square of the difference, over that of what is expected from its mean."""
    one, other = torch.tensor(found).double(), torch.tensor(expected).double()
    return float((one - other).norm() / (other - other.mean()).norm())


def outside_top(logits: Tensor, ids: Sequence[int], most: int = 5) -> int:
    """How many of the ids [T] are not among the `most` likeliest of logits [T, V]."""
    likely = logits.topk(most).indices == torch.tensor(ids)[:, None]
    return int((~likely.any(-1)).sum())


def rows() -> list[list[int]]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (70,), generator=rng).tolist() for _ in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_head(tmp_path_factory.mktemp("large") / "model")


def scores(backend: Backend, texts: list[list[int]]) -> list[float]:
    """log p of the last 60 tokens of each."""
    return [value for row in backend.score(texts) for value in row[-60:]]


def test_rounding_is_close_and_a_wrong_prompt_and_a_train_step_are_not(folder: Path) -> None:
    backend = backend_of(folder, max_token_len=600)
    expected = scores(backend, rows())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = scores(backend, rows())
    assert 0 < distance(rounded, expected) < LIMIT / 2
    wrong = [[(row[0] + 1) % VOCABULARY, *row[1:]] for row in rows()]
    assert distance(scores(backend, wrong), expected) > LIMIT * 2
    recipe = get_recipe(SimpleNamespace(algorithm_type="grpo", kl_loss_fn="none"))
    train_step(backend, recipe, experiences(), version=0)
    assert distance(scores(backend, rows()), expected) > LIMIT * 2


def test_likeliest_ids_of_another_prompt_are_outside_of_the_top_five(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    one, other = torch.tensor(rows()[:2])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(one[None]).logits[0]
        wrong = model(torch.cat([other[:10], one[10:]])[None]).logits[0, 10:]
    with torch.no_grad():
        logits = model(one[None]).logits[0]
    assert outside_top(logits, rounded.argmax(-1).tolist()) == 0
    assert outside_top(logits[10:], wrong.argmax(-1).tolist()) > 0

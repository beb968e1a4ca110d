"""The tree search example: branches of one reply, and no sampled token is trained twice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ext.multi_turn.test_scheduler import run
from tests.model.fake import make
from tests.model.test_turn import spans
from trireme import Experience, Task
from trireme.model.model import Model

FOLDER = Path(__file__).parents[2] / "examples" / "multi_turn_scheduler"
ROW = {"messages": [{"role": "user", "content": "2+2?"}], "solution": "4"}
FIRST = "2+2 is <answer>5</answer>"
HALF = FIRST[: len(FIRST) // 2]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])


def play(model: Model, **args: Any) -> list[Experience]:
    task = Task(
        raw_task=ROW,
        workflow_args={"scheduler": "tree_search:TreeSearch", **args},
        reward_fn_args={"funcs": ["accuracy"]},
    )
    return run(model, task)


def trained(found: list[Experience]) -> list[str]:
    return [text for e in found for on, text in spans(e) if on]


@pytest.mark.parametrize("seed", range(3))
def test_no_sampled_token_is_trained_twice(seed: int) -> None:
    ends = ["wer>4</answer>", "wer>4</answer>", f"wer>{seed}</answer>"]  # two are the same
    model = make([FIRST, *ends])
    found = play(model, branches=3)
    assert len(found) == 4
    # all that was sampled, once: ids that were sampled are those of the calls that were not cut
    sampled = sum(len(c.completion.ids) for c in model.recorder if c.origin is None)
    assert sum(int(e.mask.sum()) for e in found) == sampled
    assert trained(found) == [f"{text}<|im_end|>" for text in [FIRST, *ends]]
    for branch in found[1:]:
        assert branch.versions is not None and branch.logprobs is not None
        assert int((branch.versions >= 0).sum()) > int(branch.mask.sum())  # the shared half
    assert [e.reward for e in found] == [0, 1, 1, 0]


def test_the_best_branch_alone_trains_the_shared_half_and_its_own() -> None:
    model = make([FIRST, "wer>6</answer>", "wer>4</answer>", "wer>7</answer>"])
    [best] = play(model, branches=3, keep="best")
    assert best.reward == 1.0
    assert trained([best]) == [HALF + "wer>4</answer><|im_end|>"]
    assert best.logprobs is not None
    own = best.logprobs[best.mask].tolist()
    assert own[: len(HALF)] == pytest.approx([-0.5 - 0.01 * i for i in range(len(HALF))])


def test_the_plug_in_is_short() -> None:
    assert len((FOLDER / "tree_search.py").read_text().splitlines()) <= 60

"""The model as its own judge: what replies earn, and what judgements do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.model.fake import FakeEngine, make
from tests.workflows import test_trinity_classes
from trireme import Experience, Task
from trireme.explorer.metrics import runs_of
from trireme.explorer.runner import Outcome, stamp
from trireme.ext.judges.workflows import MathRulerWorkflow, MathTrainableRulerWorkflow, agreement
from trireme.pipeline.operators import pass_rates
from trireme.workflows.workflow import resolve

GOOD = "<think>\n6 * 7\n</think>\n<answer>\n42\n</answer>"
BAD = GOOD.replace("42", "41")  # worth 0.1: the tags are right
SPEC = resolve("math_trainable_ruler_workflow")


def run(judgements: list[str], share: float, **fields: Any) -> tuple[list[Experience], FakeEngine]:
    """Two runs, the second wrong, with their ids."""
    model = make([GOOD, BAD, *judgements])
    task = Task(
        raw_task={"prompt": "6 * 7?", "response": "42"},
        workflow_args={"truth_share": share},
        batch_id=3,
        task_id=7,
        index={"taskset_id": 0, "index": 5},
        **fields,
    )
    assert isinstance(model.engine, FakeEngine)
    found = asyncio.run(SPEC.call(task, model, 2, 0))
    return stamp(found, task, [0, 1], SPEC), model.engine


def test_without_the_truth_its_scores_are_the_rewards() -> None:
    found, engine = run(["hm [0.2, 0.9]"], 0.0)
    assert [(e.eid.tid, e.eid.run, e.reward) for e in found] == [("3/7", 0, 0.2), ("3/7", 1, 0.9)]
    assert [e.metrics["gold_reward"] for e in found] == [pytest.approx(1.1), pytest.approx(0.1)]
    assert found[0].metrics["judge_success"] == 1.0
    assert [s.n for s in engine.samplings] == [2, 1]


def test_without_the_truth_an_unreadable_judgement_earns_nobody_anything() -> None:
    found, _ = run(["both are fine"], 0.0)
    assert [e.reward for e in found] == [0.0, 0.0] and found[0].metrics["judge_success"] == 0.0


def test_with_the_truth_judgements_are_a_group_of_their_own() -> None:
    found, _ = run(["[1, 0.3]", "none"], 1.0)
    assert [(e.eid.tid, e.eid.run) for e in found] == [
        ("3/7", 0), ("3/7", 1), ("3/7-ruler", 0), ("3/7-ruler", 1)
    ]  # fmt: skip
    # |1 - 1| and |0.3 - 0.1|; the second cannot be read
    expected = [1.1, 0.1, 1 - 0.2 / 2, 0.0]
    assert [e.reward for e in found] == [pytest.approx(x) for x in expected]
    assert found[0].metrics["judge_success"] == 0.5
    assert bool(found[2].mask.any()), "judgements are trained"


def test_judgements_are_no_rollouts_of_the_task() -> None:
    found, _ = run(["[1, 0.3]", "none"], 1.0)
    outcome = Outcome(Task(task_id=7, index={"taskset_id": 0, "index": 5}), found)
    assert [row["reward"] for row in runs_of(outcome.rollouts)] == [
        pytest.approx(1.1),
        pytest.approx(0.1),
    ]
    assert pass_rates(found) == {0: {5: pytest.approx(0.6)}}
    assert ["task_index" in e.info for e in found] == [True, True, False, False]


def test_an_evaluation_asks_for_no_judgement() -> None:
    found, engine = run([], 1.0, is_eval=True)
    assert len(found) == 2 and len(engine.prompts) == 1
    assert [e.reward for e in found] == [pytest.approx(1.1), pytest.approx(0.1)]


def test_agreement_against_hand_worked_numbers() -> None:
    assert agreement([0.5, 0.5], [1.1, -0.1]) == pytest.approx(0.5)
    assert agreement([1.0, 0.0], [1.1, -0.1]) == 1.0
    assert agreement(None, [1.0]) == 0.0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"workflow_args": {"truth_share": 2}}, "truth_share is 2: expected 0 to 1"),
        (
            {"reward_fn": "ruler"},
            "default_reward_fn_type is 'ruler': expected one such as math_reward",
        ),
    ],
)
def test_options_that_cannot_be_are_told_before_the_run(fields: dict[str, Any], told: str) -> None:
    assert SPEC.examine is not None
    with pytest.raises(ValueError, match=told):
        SPEC.examine(Task(raw_task={"prompt": "6 * 7?"}, **fields))


def test_the_spec_s_names_resolve() -> None:
    for name in ("math_rm_workflow", "math_ruler_workflow", "rubric_judge_workflow"):
        resolve(name)
        assert resolve(name).judge is not None
    assert MathRulerWorkflow.default_reward == "ruler"


@pytest.mark.parametrize("base", [MathRulerWorkflow, MathTrainableRulerWorkflow])
def test_each_has_a_run_that_a_plain_one_may_call(base: type) -> None:
    test_trinity_classes.test_each_single_turn_workflow_has_a_run_that_a_plain_one_may_call(base)

"""Metrics of outcomes: means over runs, bootstrapped best and worst, and failures that count."""

from __future__ import annotations

import pytest

from trireme.experience import EID, Experience
from trireme.explorer.metrics import evaluation_metrics, pass_metrics, rollout_metrics
from trireme.explorer.runner import Failed, Outcome
from trireme.task import Task
from trireme.usercode import Fault


def one(task: int, run: int, reward: float, step: int = 0) -> Experience:
    return Experience(
        [1, 2, 3],
        prompt_length=1,
        reward=reward,
        eid=EID(1, task, run, step),
        metrics={"accuracy": reward},
        stop_reason="length" if reward == 0 else "stop",
    )


def test_mean_std_best_and_worst_of_two_runs_by_hand() -> None:
    metrics = pass_metrics([[0.0, 1.0], [1.0, 1.0]])
    assert metrics["mean@2"] == 0.75
    assert metrics["std@2"] == 0.25
    assert metrics["best@2"] == pytest.approx((0.75 + 1) / 2, abs=0.03)
    assert metrics["worst@2"] == pytest.approx((0.25 + 1) / 2, abs=0.03)


def test_powers_of_two_below_n_and_n_itself_are_reported() -> None:
    assert {k for k in pass_metrics([[0.0] * 6]) if k.startswith("best")} == {
        "best@2",
        "best@4",
        "best@6",
    }
    assert pass_metrics([[1.0], [0.0]]) == {"mean@1": 0.5}
    assert pass_metrics([]) == {}


def test_the_last_step_gives_a_runs_reward() -> None:
    outcome = Outcome(Task(), [one(0, 0, 0.25, step=0), one(0, 0, 1.0, step=1)])
    metrics = rollout_metrics([outcome])
    assert metrics["rollout/reward/mean"] == 1.0
    assert metrics["rollout/response_length/mean"] == 4
    assert metrics["rollout/accuracy/mean"] == 0.625


def test_a_metric_of_the_workflow_replaces_no_fact_of_the_run() -> None:
    """A part of a reward may be called `reward`: the sum is what is trained."""
    parts = {"reward": 0.0, "format": 0.5, "truncated": 0.0, "response_length": 99.0}
    experience = Experience([1, 2, 3], prompt_length=1, reward=0.5, eid=EID(1, 0, 0),
                            metrics=parts, stop_reason="length")  # fmt: skip
    outcome = Outcome(Task(), [experience])
    training = rollout_metrics([outcome])
    names = ("reward", "format", "truncated", "response_length")
    assert [training[f"rollout/{name}/mean"] for name in names] == [0.5, 0.5, 1.0, 2.0]
    assert evaluation_metrics([outcome], repeat_times=1)["reward/mean@1"] == 0.5


def test_a_failed_rollout_is_counted_and_lowers_an_evaluation() -> None:
    good = Outcome(Task(), [one(0, 0, 1.0)])
    bad = Outcome(
        Task(),
        failures=[Failed("1/1/0", "timeout", Fault("workflow 'w'", "too long", "", lasting=False))],
    )
    metrics = evaluation_metrics([good, bad], repeat_times=1)
    assert metrics["accuracy/mean@1"] == 0.5
    assert metrics["failed"] == 1 and metrics["tasks"] == 2
    training = rollout_metrics([good, bad])
    assert training["rollout/failed/timeout"] == 1 and training["rollout/reward/mean"] == 1.0


def test_a_run_whose_prompt_was_too_long_is_not_one_that_trains_nothing_besides() -> None:
    learns, overlong, *masked = (one(0, run, 0.0) for run in range(4))
    for e in (overlong, *masked):
        e.mask[:] = False
    overlong.truncate_status = "prompt_truncated"
    # a second step makes the run one that trains
    more = [one(0, 4, 0.0, step=0), one(0, 4, 0.0, step=1)]
    more[0].mask[:] = False
    metrics = rollout_metrics([Outcome(Task(), [learns, overlong, *masked, *more])])
    assert metrics["rollout/runs"] == 5
    assert metrics["rollout/prompt_truncated/mean"] == 0.2
    assert metrics["rollout/untrained/mean"] == 0.4

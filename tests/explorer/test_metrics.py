"""Metrics of outcomes: means over runs, best and worst, and failures that count."""

from __future__ import annotations

import itertools
from statistics import fmean

import pytest

from trireme.experience import EID, Experience
from trireme.explorer.metrics import (
    Lost,
    by_cause,
    evaluation_metrics,
    pass_metrics,
    rollout_metrics,
)
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
    assert metrics["best@2"] == pytest.approx((0.75 + 1) / 2, abs=1e-12)
    assert metrics["worst@2"] == pytest.approx((0.25 + 1) / 2, abs=1e-12)


def test_best_and_worst_are_the_means_over_all_draws() -> None:
    runs = [0.25, -1.0, 2.0, 0.25]
    metrics = pass_metrics([runs, [3.0]])  # a task of which other runs are missing
    for k in (2, 4):
        draws = list(itertools.product(runs, repeat=k))
        best, worst = fmean(map(max, draws)), fmean(map(min, draws))
        assert metrics[f"best@{k}"] == pytest.approx((best + 3) / 2, abs=1e-12)
        assert metrics[f"worst@{k}"] == pytest.approx((worst + 3) / 2, abs=1e-12)


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


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("gave <Foo object at 0x7f{}c6d>: expected a number", "my.py:1: def mine():"),
        ("gave 'about 0.{}': expected a number", "my.py:1: def mine():"),
        ("gave ('a: {}', 2): expected a number", "my.py:1: def mine():"),
        ("ValueError: no price for {}", "my.py:3: raise ValueError(item)"),
        ("ConnectionError: <Pool object at 0x7f{}c6d> is closed", ""),
        ("ValueError: a prompt has {} tokens: expected at most 512", ""),
    ],
)
def test_failures_whose_values_differ_have_one_cause(text: str, place: str) -> None:
    faults = [Fault("reward 'mine'", text.format(n), place, lasting=True) for n in (10, 20, 30)]
    failures = [Failed("1/0/0", "error", fault) for fault in faults]
    assert list(map(len, by_cause(failures).values())) == [3]
    lost = Lost()
    lost.add(4, by_cause(failures))
    assert str(lost) == (
        f"3 of 4 rollouts failed and were left out: 3 x reward 'mine': {text.format(10)}"
    )


def test_failures_of_one_line_with_other_expectations_are_two_causes() -> None:
    texts = ["gave nan: expected a finite number", "gave 'x': expected a number", "gave {}: x"]
    faults = [Fault("reward 'mine'", text, "my.py:1: def mine():", lasting=True) for text in texts]
    assert len(by_cause([Failed("1/0/0", "error", fault) for fault in faults])) == 3


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

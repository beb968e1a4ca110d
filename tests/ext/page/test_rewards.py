"""How rewards are distributed: counts against a plain loop, and rows that values share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.ext.page.made import make_run
from trireme.ext.page.rewards import MOST_COLUMNS, MOST_ROWS, distribution
from trireme.ext.page.rollouts import RolloutIndex


def test_counts_are_those_of_a_loop() -> None:
    draw = np.random.default_rng(0)
    steps, rewards = draw.integers(1, 9, 500), draw.normal(size=500)
    found = distribution(steps, rewards)
    assert found is not None
    assert found["columns"] == [[step, step] for step in range(1, 9)]
    for (step, _), counts in zip(found["columns"], found["counts"], strict=True):
        assert sum(counts) == (steps == step).sum()
        for extent, count in zip(found["rows"], counts, strict=True):
            inside = 0 if extent is None else (
                (steps == step) & (rewards >= extent[0]) & (rewards <= extent[1])
            ).sum()  # fmt: skip
            assert count == inside


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ([0.0, 1.0], [0, None, None, None, 1]),
        ([0.0, 0.5, 1.0], [0, None, 0.5, None, 1]),
        ([-1.0, -1 + 2 / 3, 1.0], [-1, None, -1 + 2 / 3, None, None, None, 1]),
        ([0.0, 0.1, 0.30000000000000004, 1.0], [0, 0.1, None, 0.3, *[None] * 6, 1]),
    ],
)
def test_few_different_rewards_have_a_row_each_with_empty_ones_between(
    values: list[float], rows: list[float | None]
) -> None:
    found = distribution(np.array([1] * len(values)), np.array(values))
    assert found is not None
    assert found["rows"] == [None if row is None else pytest.approx([row, row]) for row in rows]


@pytest.mark.parametrize("values", [[0.0, 0.001, 1.0], list(range(100)), [0.0, 0.37, 1.0, 1.01]])
def test_others_share_rows_between_the_lowest_and_the_highest(values: list[float]) -> None:
    found = distribution(np.array([1] * len(values)), np.array(values))
    assert found is not None
    assert len(found["rows"]) == len(found["middles"]) == MOST_ROWS
    assert [found["middles"][0], found["middles"][-1]] == [min(values), max(values)]


def test_many_steps_share_columns_and_none_is_lost() -> None:
    steps = np.repeat(np.arange(1, 1002), 2)
    found = distribution(steps, np.tile([0.0, 1.0], 1001))
    assert found is not None
    assert len(found["columns"]) <= MOST_COLUMNS
    assert found["columns"][0][0] == 1 and found["columns"][-1][1] == 1001
    ends = [last for _, last in found["columns"]]
    assert [first - 1 for first, _ in found["columns"][1:]] == ends[:-1]
    assert sum(map(sum, found["counts"])) == 2002


@pytest.mark.parametrize(
    "rewards",
    [[], [0.0, 0.0], [0.5, 0.5], [float("nan"), 1.0], [float("inf"), 1.0], [0.3, 0.1 + 0.2]],
)
def test_rewards_that_are_equal_have_no_distribution(rewards: list[float]) -> None:
    assert distribution(np.ones(len(rewards), np.int64), np.array(rewards)) is None


def test_a_run_counts_sampled_rollouts_alone(tmp_path: Path) -> None:
    rollouts = RolloutIndex(make_run(tmp_path / "run", steps=3, tasks=2, runs=4))
    rollouts.refresh()
    found = rollouts.rewards()
    assert found is not None
    rows = [row and row[0] for row in found["rows"]]
    sampled = Counter(
        {
            value: sum(column)
            for value, column in zip(rows, zip(*found["counts"], strict=True), strict=True)
        }
    )
    assert (sampled[0.0], sampled[1.0]) == (12, 12)  # held-out ones are not among them

"""pass@k, intervals and paired comparisons against hand-worked values."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from trireme.ext.evaluation.scores import difference, estimate, pass_at


def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_success() -> None:
    values = [1.0, 0.0, 0.4, 1.0, 0.0]
    for k in range(1, 6):
        draws = list(itertools.combinations(values, k))
        expected = sum(max(draw) >= 1 for draw in draws) / len(draws)
        assert pass_at(k, values) == pytest.approx(expected, abs=1e-15)
    assert pass_at(2, values, success=0.4) == pytest.approx(1 - 1 / 10)  # C(2, 2) / C(5, 2)
    with pytest.raises(ValueError, match="pass@6 of 5 rollouts: expected a k from 1 to 5"):
        pass_at(6, values)


def test_an_interval_of_shares_is_wilsons_and_else_the_normal_one() -> None:
    seen = estimate([1.0] * 8 + [0.0] * 2)  # Wilson at 8 of 10: 0.4902 to 0.9433
    assert (seen.mean, seen.low, seen.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert estimate([0.0] * 10).high == pytest.approx(0.2775, abs=1e-4)  # never nothing
    values = [0.25, 0.5, 0.75, 1.0]  # p (1 - p) / s^2 = 0.234375 / 0.0260417: 9 tasks of 0 or 1
    seen = estimate(values)
    assert (seen.low, seen.high) == pytest.approx((0.3202, 0.8550), abs=1e-4)
    assert estimate([0.0, 0.0, 0.25]).low >= 0 and estimate([1.0, 1.0, 0.75]).high <= 1
    rewards = [-1.0, 0.5, 2.0, 1.0]
    half = 1.959964 * statistics.stdev(rewards) / 2
    seen = estimate(rewards)
    assert (seen.low, seen.high) == pytest.approx((0.625 - half, 0.625 + half))
    assert math.isinf(estimate([1.5]).high)  # of one task nothing is known


def test_a_comparison_is_made_task_by_task() -> None:
    first, second = [0.1, 0.2, 0.9, 0.4], [0.3, 0.4, 0.9, 0.5]
    found = difference(first, second)
    assert found.mean == pytest.approx(0.125)
    # gains 0.2, 0.2, 0, 0.1: of 8 signs of what moved only +++ and --- are as far from 0
    assert found.p == pytest.approx(2 / 8)
    assert difference(first, first).p == 1
    shares = difference([0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    assert (shares.mean, shares.high) == (0.75, 1.0) and shares.low == pytest.approx(0.26, abs=0.01)
    assert difference([0.0, 0.0, 0.0, 1.1], [1.0, 1.0, 1.0, 1.1]).high > 1.2
    with pytest.raises(ValueError, match="4 and 3 tasks: expected the same ones"):
        difference(first, second[:3])


def test_many_tasks_are_compared_by_random_signs() -> None:
    first = [0.0] * 40
    assert difference(first, [1.0] * 40).p < 0.001
    mixed = [(-1.0) ** i for i in range(40)]
    assert difference(first, mixed).p > 0.5
    assert difference(first, [1.0] * 40) == difference(first, [1.0] * 40)

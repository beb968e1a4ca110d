"""Selectors: orders worked out by hand, beliefs as in the formula, states that come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.data.made import selection_of
from tests.data.test_selectors import goes_on_alike
from trireme.data.selectors import Selection

FEATURES = [(0.0, 1.0), (0.2, 0.6), (0.5, 0.5), (0.2, 0.9)]


def difficulty(features: Sequence[Sequence[float]] = FEATURES, **options: Any) -> Selection:
    return selection_of(
        "difficulty_based", len(features), seed=3, features=features, options=options
    )


def test_easy_to_hard_is_the_highest_feature_first_and_of_equals_the_later_row() -> None:
    features = [(0.5, 1), (0.9, 0), (0.5, 2), (0.9, 0)]
    chosen = selection_of("offline_easy2hard", 4, features=features)
    assert chosen.select(4) == [3, 1, 2, 0]
    assert chosen.select(4) == [3, 1, 2, 0]


def test_beliefs_move_as_the_formula_says() -> None:
    chosen = difficulty(m=10, lamb=0.5, rho=0.2)
    chosen.feedback({0: 0.5, 1: 0.3})
    # standing: (mean p - mean weak) / (mean strong - mean weak) = (.4 - .1) / (.8 - .1) = 3/7
    standing = 3 / 7
    expected = [0.5, 0.3, 0.5, 0.2 + standing * 0.7]
    weights = [10, 10, 2, 2]  # m where it was tried, rho * m where it was not
    state = chosen.state()
    alphas = [0.5 + 0.5 + w * p for w, p in zip(weights, expected, strict=True)]
    betas = [0.5 + 0.5 + w * (1 - p) for w, p in zip(weights, expected, strict=True)]
    assert np.allclose(state["alphas"], alphas) and np.allclose(state["betas"], betas)
    assert state["standing"] == pytest.approx(standing)
    chosen.feedback({0: 1.0})
    assert chosen.state()["standing"] == pytest.approx(0.9 * standing + 0.1 * 1.0)
    assert chosen.state()["alphas"][0] == pytest.approx(0.5 * alphas[0] + 0.5 + 10 * 1.0)


def test_the_best_rows_are_those_nearest_to_the_target() -> None:
    chosen = difficulty(tau=0, target_reward=0.5)
    chosen.feedback({0: 0.0, 1: 1.0, 2: 0.5, 3: 0.9})
    assert chosen.select(2) == [2, 3]


def test_draws_follow_the_softmax_of_the_scores() -> None:
    chosen = difficulty(tau=0.25, target_reward=1.0)
    chosen.feedback({0: 0.0, 1: 1.0, 2: 0.5, 3: 0.75})
    state = chosen.state()
    means = np.array(state["alphas"]) / (np.array(state["alphas"]) + np.array(state["betas"]))
    weights = np.exp(-np.abs(1 - means) / 0.25)
    counts = Counter(chosen.select(1)[0] for _ in range(4000))
    shares = [counts[row] / 4000 for row in range(4)]
    assert np.abs(np.array(shares) - weights / weights.sum()).max() < 0.03


def test_a_draw_has_no_row_twice_and_goes_round_where_more_are_wanted() -> None:
    chosen = difficulty()
    assert sorted(chosen.select(4)) == [0, 1, 2, 3]
    assert Counter(chosen.select(8)) == dict.fromkeys(range(4), 2)


def test_rows_that_both_references_solve_alike_leave_the_standing_as_it_is() -> None:
    chosen = difficulty()
    chosen.feedback({2: 1.0})
    assert chosen.state()["standing"] is None


def test_a_misleading_interpolation_is_trusted_less() -> None:
    chosen = difficulty(adaptive_rho=True)
    chosen.feedback({0: 0.9, 3: 0.1})
    assert chosen.state()["rho"] == 0.1


@pytest.mark.parametrize("name", ["offline_easy2hard", "difficulty_based"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "tau": 0.1}])
def test_a_state_that_went_through_json_goes_on_alike(name: str, options: dict[str, Any]) -> None:
    options = options if name == "difficulty_based" else {}
    goes_on_alike(lambda: selection_of(name, 4, seed=5, features=FEATURES, options=options))


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        (
            "difficulty_based",
            {"features": FEATURES, "options": {"target": 1}},
            r"has no option 'target' \(did you mean 'target_reward'\?\)",
        ),
        ("difficulty_based", {}, "give the columns that hold them as data_selector.feature_keys"),
        ("offline_easy2hard", {}, "give the columns that hold them"),
        ("difficulty_based", {"features": [(1.0,)] * 4}, "got 1 feature_keys: expected two"),
        (
            "difficulty_based",
            {"features": FEATURES, "options": {"rho": 2}},
            "rho is 2: expected 0 to 1",
        ),
    ],
)
def test_what_cannot_be_is_named(name: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        selection_of(name, 4, **given)


def test_a_state_of_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="knows 4 rows and the taskset has 2: it has changed"):
        difficulty(FEATURES[:2]).load_state(difficulty().state())

"""Selectors: orders worked out by hand, beliefs as in the formula, states that come back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.data.made import selection_of
from trireme.data.selectors import BaseSelector, Selection

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


def test_no_order_of_a_shuffled_epoch_is_that_of_another() -> None:
    chosen = selection_of("shuffle", 20, seed=1)
    epochs = [tuple(chosen.select(20)) for _ in range(4)]
    assert len(set(epochs)) == 4 and all(sorted(epoch) == list(range(20)) for epoch in epochs)


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


@pytest.mark.parametrize(
    "name", ["sequential", "shuffle", "random", "offline_easy2hard", "difficulty_based"]
)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "tau": 0.1}])
def test_a_state_that_went_through_json_goes_on_alike(name: str, options: dict[str, Any]) -> None:
    options = options if name == "difficulty_based" else {}

    def one() -> Selection:
        return selection_of(name, 4, seed=5, features=FEATURES, options=options)

    whole, resumed = one(), one()
    for rate in (0.1, 0.7):
        whole.feedback(dict.fromkeys(whole.select(3), rate))
    resumed.load_state(json.loads(json.dumps(whole.state())))
    for rate in (0.4, 0.2, 0.9):
        rows = whole.select(3)
        assert rows == resumed.select(3)
        whole.feedback(dict.fromkeys(rows, rate))
        resumed.feedback(dict.fromkeys(rows, rate))


class Backwards:
    """A user's own, in the class form."""

    def __init__(self, rows: int, seed: int, *, stride: int = 1) -> None:
        self.rows, self.stride, self.place = rows, stride, 0

    def select(self, count: int) -> list[int]:
        self.place += count * self.stride
        return [(-self.place + i) % self.rows for i in range(count)]

    def feedback(self, pass_rates: Mapping[int, float]) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.place = state["place"]


class Nearest(BaseSelector):
    """A user's own, in the class form of Trinity-RFT."""

    def __init__(self, data_source: Any, config: Any) -> None:
        super().__init__(data_source, config)
        assert data_source.dataset_size == len(data_source.dataset)
        self.rates = np.array(data_source.dataset[config.feature_keys[0]])
        self.asked = 0

    def get_indices(self, batch_size: int, return_extra_info: bool = False) -> Any:
        self.asked += batch_size
        near = np.abs(self.rates - self.config.kwargs["target"])
        return np.argsort(near, kind="stable")[:batch_size]

    def feedback(self, indices: list[int], values: list[float]) -> None:
        self.rates[indices] = values

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked, "rates": self.rates.tolist()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.asked, self.rates = state_dict["asked"], np.array(state_dict["rates"])


class OffTheEnd(Nearest):
    def get_indices(self, batch_size: int, return_extra_info: bool = False) -> Any:
        return [99] * batch_size


class KeepsArrays(Nearest):
    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates}


def near(kind: str) -> Selection:
    rows = [{"rate": rate} for rate in (0.1, 0.5, 0.9, 0.4)]
    options = {"options": {"target": 0.5}, "feature_keys": ["rate"], "data": rows}
    return selection_of(f"{__name__}:{kind}", 4, **options)


def test_a_selector_in_the_class_form_of_trinity() -> None:
    chosen = near("Nearest")
    assert chosen.select(2) == [1, 3]
    chosen.feedback({1: 0.0, 0: 0.5})
    assert chosen.select(2) == [0, 3]
    chosen.feedback({})
    again = near("Nearest")
    again.load_state(json.loads(json.dumps(chosen.state())))
    assert again.state()["asked"] == 4 and again.select(2) == [0, 3]
    with pytest.raises(
        ValueError, match=r"get_indices\(2\) gave \[99, 99\]: expected 2 of the rows"
    ):
        near("OffTheEnd").select(2)
    with pytest.raises(ValueError, match="KeepsArrays': state_dict cannot be stored as JSON"):
        near("KeepsArrays")


def every_other(rows: int, epoch: int, seed: int, *, first: int = 0) -> list[int]:
    """A user's own, in the function form."""
    return [*range(first, rows, 2), *range(1 - first, rows, 2)]


def test_a_users_own_selector_by_its_path() -> None:
    assert selection_of(f"{__name__}.every_other", 4, options={"first": 1}).select(4) == [
        1,
        3,
        0,
        2,
    ]
    assert selection_of(f"{__name__}:Backwards", 4, options={"stride": 2}).select(2) == [0, 1]


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("suffle", {}, "unknown data_selector 'suffle'; did you mean 'shuffle'"),
        ("shuffle", {"options": {"x": 1}}, "'shuffle' has no option 'x'. It has no options"),
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

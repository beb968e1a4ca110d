"""Selectors: orders worked out by hand, beliefs as in the formula, states that come back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.data.made import selection_of, taskset_of
from trireme.data.rows import Rows
from trireme.data.selectors import BaseSelector, Selection
from trireme.data.tasksets import Mixture


def test_no_order_of_a_shuffled_epoch_is_that_of_another() -> None:
    chosen = selection_of("shuffle", 20, seed=1)
    epochs = [tuple(chosen.select(20)) for _ in range(4)]
    assert len(set(epochs)) == 4 and all(sorted(epoch) == list(range(20)) for epoch in epochs)


@pytest.mark.parametrize("name", ["sequential", "shuffle", "random"])
def test_a_state_that_went_through_json_goes_on_alike(name: str) -> None:
    goes_on_alike(lambda: selection_of(name, 4, seed=5))


def goes_on_alike(one: Callable[[], Selection]) -> None:
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


def test_a_run_whose_selector_learned_is_resumed_with_an_order_at_its_next_row() -> None:
    data = Rows("dataset 'x'", [{"prompt": f"q{n}"} for n in range(8)], ["prompt"])
    options = {"name": "x", "batch_size": 3, "total_epochs": 4}
    learned = taskset_of(data, selector=f"{__name__}:Backwards", **options)
    learned.next()
    resumed = taskset_of(data, selector="sequential", **options)
    resumed.load_state(json.loads(json.dumps(learned.state())))
    assert [task.index["index"] for task in resumed.next()] == [3, 4, 5]


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


class Counts(Backwards):
    """A user's own, whose state is the list that it goes on to change."""

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__(rows, seed)
        self.counts = [0] * rows

    def select(self, count: int) -> list[int]:
        rows = super().select(count)
        for row in rows:
            self.counts[row] += 1
        return rows

    def state(self) -> dict[str, Any]:
        return {"place": self.place, "counts": self.counts}


class CountsToo(Nearest):
    """The same in the class form of Trinity-RFT."""

    def __init__(self, data_source: Any, config: Any) -> None:
        self.counts = [0] * data_source.dataset_size

    def get_indices(self, batch_size: int, return_extra_info: bool = False) -> Any:
        for row in range(batch_size):
            self.counts[row] += 1
        return range(batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}


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
    ],
)
def test_what_cannot_be_is_named(name: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        selection_of(name, 4, **given)


def from_one(rows: int, epoch: int, seed: int) -> list[int]:
    """A user's own, which counts rows from 1."""
    return [*range(1, rows + 1)]


class TooFew(Backwards):
    """A user's own, which gives less than it is asked for."""

    def select(self, count: int) -> list[int]:
        return super().select(count - 1)


@pytest.mark.parametrize("name", ["from_one", "TooFew"])
def test_a_selection_of_other_rows_than_there_are_is_refused(name: str) -> None:
    data = [{"prompt": "x"}] * 4
    options: dict[str, Any] = {"batch_size": 2, "workflow": "w", "selector": f"{__name__}:{name}"}
    alone = taskset_of(Rows("x", data, data[0]), name="x", **options)
    mixed = [taskset_of(Rows("x", data, data[0]), name="x", taskset_id=n, **options)
             for n in range(2)]  # fmt: skip
    for tasks in (alone, Mixture(mixed, batch_size=4)):
        with pytest.raises(ValueError, match=r"^taskset 'x': its data_selector gave the rows .*: "):
            for _ in range(2):
                tasks.next()


@pytest.mark.parametrize("kind", [Counts, CountsToo])
def test_a_state_of_a_users_selector_stays_as_it_was(kind: type) -> None:
    """An explore step's state is kept until its experiences are stored, while later ones begin."""
    data = [{"prompt": "x"}] * 4
    taskset = taskset_of(
        Rows("x", data, data[0]),
        name="x",
        batch_size=2,
        repeat_times=1,
        workflow="simple_workflow",
        selector=f"{__name__}:{kind.__name__}",
    )
    state = taskset.state()
    taskset.next()
    assert state["selector"]["counts"] == [0] * 4 != taskset.state()["selector"]["counts"]


def test_a_state_of_another_selector_is_refused_by_both_names() -> None:
    data = [{"q": str(n), "rate": n / 4} for n in range(4)]
    made = Rows("x", data, ["q", "rate"])

    def tasks(selector: str, **options: Any) -> Any:
        options |= {"selector": selector, "batch_size": 2, "format_args": {"prompt_key": "q"}}
        return taskset_of(made, name="sums", **options)

    here = "tests.data.test_selectors"
    nearest = {"feature_keys": ["rate"], "selector_args": {"target": 0.5}}
    orders, counts = tasks("shuffle"), tasks(f"{here}:Counts")
    learned = tasks(f"{here}:Nearest", **nearest)
    for former, said in ((counts, "that of Counts"), (orders, "none")):
        with pytest.raises(ValueError, match=f"is Nearest, .* the checkpoint has {said}: expected"):
            learned.load_state(former.state())
    state = counts.state()
    assert state.pop("selector_class") == "Counts"
    tasks(f"{here}:Counts").load_state(state)  # as earlier versions wrote it
    orders.load_state(learned.state())  # an order needs only the position

"""Mixtures: every row of each taskset once an epoch, in an order that a resume goes on with."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.data.made import taskset_of
from tests.data.test_tasksets import all_batches, rows
from trireme.data.rows import Rows
from trireme.data.tasksets import Exhausted, Mixture
from trireme.task import Task

FORMAT = {"prompt_key": "question", "response_key": "answer"}


def mixture(*selectors: str, sizes: tuple[int, ...] = (6, 3, 1), **options: Any) -> Mixture:
    names = selectors or ("sequential",) * len(sizes)
    tasksets = []
    for place, (size, selector) in enumerate(zip(sizes, names, strict=True)):
        data = [{"question": "q", "answer": "a", "weak": n / 9, "strong": 1.0} for n in range(size)]
        learns = selector in ("difficulty_based", "offline_easy2hard")
        tasksets.append(
            taskset_of(
                Rows("x", data, data[0]),
                name=f"set_{place}",
                batch_size=1,
                format_args=FORMAT,
                workflow=f"workflow_{place}",
                selector=selector,
                feature_keys=["weak", "strong"] if learns else [],
                taskset_id=place,
            )
        )
    return Mixture(tasksets, **({"batch_size": 4} | options))


def index_of(task: Task) -> tuple[int, int]:
    return task.index["taskset_id"], task.index["index"]


def test_an_epoch_holds_each_row_of_each_taskset_once() -> None:
    mixed = mixture(batch_size=5, total_epochs=2)
    batches = [[index_of(task) for task in mixed.next()] for _ in range(4)]
    every = Counter((t, row) for t, size in enumerate((6, 3, 1)) for row in range(size))
    assert Counter(batches[0] + batches[1]) == every == Counter(batches[2] + batches[3])


def test_tasksets_come_in_the_shuffled_order_of_their_epoch() -> None:
    mixed = mixture(batch_size=10, total_epochs=2)
    for epoch in range(2):
        order = np.array([0] * 6 + [1] * 3 + [2])
        np.random.default_rng(epoch).shuffle(order)
        tasks = mixed.next()
        assert [task.index["taskset_id"] for task in tasks] == order.tolist()
        assert [task.workflow for task in tasks] == [f"workflow_{i}" for i in order]
        assert [task.task_id for task in tasks] == list(range(10))


def test_steps_are_counted_over_all_rows() -> None:
    assert mixture(total_epochs=2).total_steps == 5
    assert len(all_batches(mixture(total_epochs=2))) == 5
    with pytest.raises(ValueError, match=r"set_0\+set_1\+set_2 have 10 rows: in 1 epoch .* 64"):
        mixture(batch_size=64)


SELECTORS = ("shuffle", "difficulty_based", "random")


@pytest.mark.extension("curricula")
def test_a_resumed_mixture_asks_for_the_same_tasks() -> None:
    def step(mixed: Mixture) -> list[tuple[int, int]]:
        chosen = [index_of(task) for task in mixed.next()]
        rates: dict[int, dict[int, float]] = {}
        for taskset, row in chosen:
            rates.setdefault(taskset, {})[row] = (row % 3) / 2
        mixed.feedback(rates)
        return chosen

    whole, resumed = (mixture(*SELECTORS, total_epochs=9) for _ in range(2))
    for _ in range(7):
        step(whole)
    resumed.load_state(json.loads(json.dumps(whole.state())))
    assert [step(whole) for _ in range(9)] == [step(resumed) for _ in range(9)]


@pytest.mark.parametrize("size", [2, 5])
def test_a_mixture_that_is_resumed_with_another_batch_size_leaves_no_row_out(size: int) -> None:
    def asked(mixed: Mixture) -> list[tuple[int, int]]:
        return [index_of(task) for task in mixed.next()]

    whole = mixture(batch_size=4, total_epochs=2)
    done = [*asked(whole), *asked(whole)]
    resumed = mixture(batch_size=size, total_epochs=2)
    resumed.load_state(json.loads(json.dumps(whole.state())))
    while len(done) + size <= 20:
        done += asked(resumed)
    once = {(t, row) for t, rows in enumerate((6, 3, 1)) for row in range(rows)}
    assert len(done) == (20 if size == 2 else 18)
    assert Counter(done[:10]) == Counter(once)
    with pytest.raises(Exhausted):
        resumed.next()


@pytest.mark.extension("curricula")
def test_feedback_reaches_the_taskset_that_it_is_of() -> None:
    mixed = mixture("difficulty_based", "difficulty_based", sizes=(3, 3))
    mixed.feedback({1: {0: 1.0}})
    first, second = (taskset.state()["selector"]["alphas"] for taskset in mixed.tasksets)
    assert first == [1.0, 1.0, 1.0] and second[0] > 10


@pytest.mark.extension("curricula")
def test_a_state_of_other_tasksets_is_refused() -> None:
    with pytest.raises(ValueError, match="tasksets are 3 and the checkpoint has the state of 2"):
        mixture().load_state(mixture(sizes=(2, 2)).state())
    learns = mixture("difficulty_based", sizes=(4,))
    with pytest.raises(ValueError, match="the checkpoint has none: expected"):
        learns.load_state(mixture(sizes=(4,)).state())


@pytest.mark.extension("curricula")
def test_a_row_without_its_number_is_named() -> None:
    data = [{"question": "q", "rate": 0.5}, {"question": "q", "rate": None}]
    with pytest.raises(ValueError, match=r"x, row 1: the column 'rate' .* holds None: expected a"):
        taskset_of(
            Rows("x", data, data[0]),
            name="x",
            batch_size=1,
            format_args={"prompt_key": "question"},
            selector="offline_easy2hard",
            feature_keys=["rate"],
        )
    with pytest.raises(ValueError, match=r"no column 'hard' \(data_selector.feature_keys\)"):
        taskset_of(
            rows(3), name="x", batch_size=1, format_args=FORMAT,
            selector="offline_easy2hard", feature_keys=["hard"],
        )  # fmt: skip

"""Tasksets: batches, epochs, resuming, and what each task carries."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.made import taskset_of
from trireme.data.rows import Rows
from trireme.data.tasksets import Exhausted, Mixture, Taskset
from trireme.task import Task

FORMAT = {"prompt_key": "question", "response_key": "answer"}


def rows(count: int, **more: str) -> Rows:
    data = [{"question": f"q{n}", "answer": f"a{n}", **more} for n in range(count)]
    return Rows("dataset 'x'", data, data[0])


def taskset(count: int = 10, **options: Any) -> Taskset:
    given: dict[str, Any] = {"name": "x", "batch_size": 4, "format_args": FORMAT, "workflow": "w"}
    return taskset_of(rows(count), **(given | options))


def all_batches(tasks: Taskset | Mixture) -> list[list[int]]:
    out = []
    with pytest.raises(Exhausted):
        while True:
            out.append([task.index["index"] for task in tasks.next()])
    return out


def test_batches_run_on_over_epochs_and_the_rest_is_left_out() -> None:
    batches = all_batches(taskset(total_epochs=2))
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert len(all_batches(taskset(total_epochs=1))) == 2


def test_only_a_column_of_answers_that_a_user_chose_must_be_there() -> None:
    for default in ("response", "solution"):
        [task, *_] = taskset(format_args=FORMAT | {"response_key": default}).next()
        assert task.truth is None
    with pytest.raises(ValueError, match=r"no column 'reply' .*did you mean 'answer'"):
        taskset(format_args=FORMAT | {"response_key": "reply"})


@pytest.mark.parametrize(
    "lacking",
    [{"question": "q"}, *({"question": "q", "answer": none} for none in (None, float("nan")))],
)
def test_a_row_without_the_answer_that_others_have_is_noted(lacking: dict[str, Any]) -> None:
    data = [{"question": "q", "answer": "a"}] * 4 + [lacking]
    places = [f"x.jsonl, line {n}" for n in range(1, 6)]

    def note(chosen: list[dict[str, Any]], **options: Any) -> str | None:
        made = Rows("dataset 'x'", chosen, ["question", "answer"], places=places)
        given: dict[str, Any] = {"name": "x", "batch_size": 1, "format_args": FORMAT}
        [found] = taskset_of(made, **(given | options)).notes() or [None]
        return found

    assert note(data) == (
        "x: 1 of 5 rows hold nothing in 'answer' (format.response_key), so that their task.truth "
        "is None or empty; the first: dataset 'x', row 4 (x.jsonl, line 5)"
    )
    assert note(data[:4]) is None
    assert Task(raw_task=lacking, format_args=FORMAT | {"response_key": "answer"}).truth is None
    assert note(data, format_args=FORMAT | {"response_key": "solution"}) == (
        "x: task.truth is None, since no column is 'solution' (format.response_key); if a reward "
        "reads it, did you mean 'answer'?"
    )
    assert note([lacking] * 5) is None  # a data set need not hold answers
    assert note([*data[:4], {"question": "q", "answer": " "}]) == note(data)
    assert note(data, reads_prompt=False) is None
    assert note(data[:4], format_args=FORMAT | {"response_key": "question"}) == (
        "x: format.response_key and format.prompt_key are both 'question', so that task.truth is "
        "the prompt"
    )
    assert note([*data[:3], {"question": "", "answer": "a"}]) == (
        "x: 1 of 4 rows has an empty 'question' (format.prompt_key), so that nothing is asked; the "
        "first: dataset 'x', row 3 (x.jsonl, line 4)"
    )
    assert note(data, format_args=FORMAT | {"reward_fn_key": "answer"}) is None
    nested = {"question": "q", "answer": {"style": "rule", "ground_truth": "7"}}
    assert note([nested]) == (
        "x: task.truth is a dictionary with style, ground_truth (format.response_key); if a reward "
        "reads text, did you mean 'answer.ground_truth'?"
    )
    assert note([{"question": "q", "answer": {"target": 7, "numbers": [3, 4]}}]) is None


def test_total_steps_go_before_epochs() -> None:
    assert len(all_batches(taskset(total_epochs=1, total_steps=7))) == 7


def test_an_evaluation_keeps_its_last_rows() -> None:
    held_out = taskset(is_eval=True)
    assert all_batches(held_out) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [task.index["index"] for task in held_out.all()] == list(range(10))
    assert all(task.is_eval for task in held_out.all())


def test_shuffling_gives_each_epoch_its_own_permutation() -> None:
    batches = all_batches(taskset(8, selector="shuffle", total_epochs=2, seed=1))
    first, second = batches[0] + batches[1], batches[2] + batches[3]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert batches == all_batches(taskset(8, selector="shuffle", total_epochs=2, seed=1))
    assert batches != all_batches(taskset(8, selector="shuffle", total_epochs=2, seed=2))


@pytest.mark.parametrize("selector", ["sequential", "shuffle", "random"])
def test_a_resumed_taskset_gives_what_the_other_would_have(selector: str) -> None:
    whole = taskset(selector=selector, total_epochs=5)
    for _ in range(5):
        whole.next()
    resumed = taskset(selector=selector, total_epochs=5)
    resumed.load_state(whole.state())
    assert all_batches(resumed) == all_batches(whole)


@pytest.mark.parametrize("size", [2, 4, 5, 8])
def test_a_run_that_is_resumed_with_another_batch_size_goes_on_with_the_next_row(size: int) -> None:
    whole = taskset(total_epochs=5)
    for _ in range(3):
        whole.next()
    in_epochs = taskset(batch_size=size, total_epochs=5)
    in_steps = taskset(batch_size=size, total_steps=7)
    for resumed in (in_epochs, in_steps):
        resumed.load_state(whole.state())
    rows_left = [row for batch in all_batches(in_epochs) for row in batch]
    assert len(rows_left) == 38 // size * size  # of 50 rows, 12 are done
    assert rows_left == [(12 + n) % 10 for n in range(len(rows_left))]
    assert len(all_batches(in_steps)) == 4


def test_a_taskset_does_not_go_on_from_a_mixture() -> None:
    mixed = Mixture([taskset(), taskset()], batch_size=4)
    said = (
        "taskset is one, 'x', and the checkpoint has the state of 2: a resumed run needs the same"
    )
    with pytest.raises(ValueError, match=said):
        taskset().load_state(mixed.state())


def test_a_task_carries_ids_columns_and_options_of_its_own() -> None:
    tasks = taskset(
        workflow_args={"max_turns": 3},
        rollout_args={"temperature": 0.7},
        reward_fn="r",
        repeat_times=8,
        taskset_id=2,
    )
    tasks.next()
    first, second = tasks.next()[:2]
    assert (first.batch_id, first.task_id, second.task_id) == (2, 0, 1)
    assert first.index == {"index": 4, "taskset_id": 2}
    assert (first.prompt, first.truth) == ("q4", "a4")
    assert (first.workflow, first.reward_fn, first.repeat_times) == ("w", "r", 8)
    first.workflow_args["max_turns"] = 99
    assert second.workflow_args == {"max_turns": 3}


def test_a_row_may_name_its_own_workflow_and_reward() -> None:
    keys = FORMAT | {"workflow_key": "kind", "reward_fn_key": "judge"}
    data = [
        {"question": "q", "answer": "a", "kind": "tool_use", "judge": None},
        {"question": "q", "answer": "a", "kind": "", "judge": "strict"},
    ]
    tasks = taskset_of(
        Rows("x", data, data[0]),
        name="x",
        batch_size=2,
        format_args=keys,
        workflow="w",
        reward_fn="r",
    ).next()
    assert [(t.workflow, t.reward_fn) for t in tasks] == [("tool_use", "r"), ("w", "strict")]


def test_a_batch_size_that_gives_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"10 rows: in 1 epoch .*batch_size 128.* at most 10"):
        taskset(batch_size=128)
    assert len(all_batches(taskset(batch_size=16, total_epochs=2))) == 1


def test_a_missing_prompt_column_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"no column 'prompt' .format\.prompt_key.*question, answer"
    ):
        taskset(format_args={})


def test_an_unknown_selector_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown data_selector 'suffle'; did you mean 'shuffle'"):
        taskset(selector="suffle")


def test_a_row_without_a_prompt_is_found_before_the_first_rollout() -> None:
    rows = Rows("tasks", [{"prompt": "a"}, {"prompt": None}], ["prompt"])
    with pytest.raises(
        ValueError, match=r"tasks, row 1: the column 'prompt' \(format.prompt_key\)"
    ):
        taskset_of(rows, name="t", batch_size=1, total_epochs=1, workflow="simple_workflow")

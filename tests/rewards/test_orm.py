"""Rewards of whole groups: their arguments, their sums, and the built-in ones by hand."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from trireme.experience import EID, Experience
from trireme.rewards.grouped import Judge, Row, reward_group
from trireme.rewards.orm import (
    ORM,
    Cosine,
    Format,
    MathAccuracy,
    Repetition,
    SoftOverlong,
)
from trireme.task import Task

TASK = Task(raw_task={"problem": "1+1?", "solution": "2"})


def rows(*texts: str) -> list[Row]:
    return [
        Row(t, [{"role": "assistant", "content": t}], tokens=[1] * (i + 1), request_id=str(i))
        for i, t in enumerate(texts)
    ]


def judge(
    funcs: list[Any], texts: list[str], weights: list[float] | None = None
) -> list[float | None]:
    return asyncio.run(Judge.of(funcs, weights).rewards(TASK, rows(*texts)))[0]


def test_columns_are_lists_in_run_order() -> None:
    seen: dict[str, Any] = {}

    class Reward(ORM):
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
            seen.update(kwargs, completions=completions)
            return [0.0] * len(completions)

    judge([Reward], ["a", "b"])
    assert seen["completions"] == ["a", "b"]
    assert seen["problem"] == ["1+1?"] * 2
    assert seen["solution"] == ["2", "2"]
    assert seen["messages"][1] == [{"role": "assistant", "content": "b"}]
    assert seen["is_truncated"] == [False, False]
    assert seen["response_token_ids"] == [[1], [1, 1]]
    assert seen["finish_reason"] == ["stop", "stop"]
    assert set(seen["trajectory_inputs"]) == {"0", "1"}
    [whole] = seen["trajectory_inputs"]["1"]
    assert whole["problem"] == "1+1?" and whole["solution"] == "2"
    assert whole["messages"][-1]["content"] == "b" == whole["completion"]
    shared = {name: rows[1] for name, rows in seen.items() if name in whole}
    assert shared | {"completion": "b"} == whole


def test_rollouts_of_any_workflow_have_ids_of_their_own() -> None:
    """A reward that looks its trajectory up by `request_id` gets that one."""

    class Own(ORM):
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
            found = [kwargs["trajectory_inputs"][name] for name in kwargs["request_id"]]
            return [float(rows[-1]["completion"]) for rows in found]

    experiences = [Experience([1, 2], prompt_length=1, response_text=text) for text in "012"]
    for run, experience in enumerate(experiences):
        experience.eid = EID(task="t", run=run)
    asyncio.run(reward_group(Judge.of([Own]), TASK, experiences, []))
    assert [experience.reward for experience in experiences] == [0.0, 1.0, 2.0]


def test_the_documents_own_form_without_self() -> None:
    class Reward(ORM):
        def __call__(completions, **kwargs):  # type: ignore[override]
            return [float(len(m)) for m in kwargs["messages"]]

    assert judge([Reward], ["a", "b"]) == [1.0, 1.0]


def test_a_class_gets_texts_with_and_without_self_where_the_prompt_is_messages() -> None:
    class Plain(ORM):
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [float(text) for text in completions]

    class WithoutSelf(ORM):
        def __call__(completions: Any, **kwargs: Any):  # type: ignore[override]
            return [float(text) for text in completions]

    task = Task(raw_task={"prompt": [{"role": "user", "content": "1+1?"}]})
    for reward in (Plain, WithoutSelf):
        judged = asyncio.run(Judge.of([reward], None).rewards(task, rows("2", "3")))
        assert judged[0] == [2.0, 3.0]


def test_a_function_gets_texts_where_a_task_has_no_prompt() -> None:
    def brief(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    task = Task(raw_task={"seed": 3})
    assert asyncio.run(Judge.of([brief], None).rewards(task, rows("2", "33")))[0] == [1.0, 2.0]


def test_a_reward_gets_just_the_columns_that_it_names() -> None:
    class Four(ORM):
        def __call__(self, completions: list[str], problem: Any, solution: Any, *,
                     messages: Any, is_truncated: Any) -> list[float]:  # fmt: skip
            return [float(text == right) for text, right in zip(completions, solution, strict=True)]

    class Unknown(ORM):
        def __call__(self, completions: list[str], level: Any) -> list[float]:
            return []

    assert judge([Four], ["2", "3"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="'Unknown' needs 'level', and the data set has no such"):
        judge([Unknown], ["2"])


def test_weights_and_what_does_not_apply() -> None:
    class Half(ORM):
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
            return [None, 1.0]

    assert judge(["accuracy", Half], ["2", "2"], [2.0, 0.5]) == [2.0, 2.5]


def test_where_nothing_applies_the_task_is_named() -> None:
    class Never(ORM):
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
            return [None] * len(completions)

    with pytest.raises(
        ValueError, match="no reward function applies to rollout 0 of task 0: Never"
    ):
        judge([Never], ["a"])


def test_asynchronous_ones_run_at_the_same_time() -> None:
    meeting: list[asyncio.Event] = []

    class Meets(ORM):
        async def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
            meeting.append(asyncio.Event())
            while len(meeting) < 2:
                await asyncio.sleep(0)
            return [1.0] * len(completions)

    assert judge([Meets, Meets], ["a"]) == [2.0]


def test_rewards_of_one_answer_are_taken_too() -> None:
    assert judge(["format_reward"], ["no"]) == [-0.1]
    assert judge([{"name": "format_reward", "coefficient": 2.0}], ["no"]) == [-2.0]


@pytest.mark.parametrize("given", [[1.0], 3.0, [1.0, "x"], [1.0, math.nan]])
def test_what_a_reward_function_may_not_give(given: Any) -> None:
    class Wrong(ORM):
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
            return given

    with pytest.raises(ValueError, match="reward 'Wrong' gave"):
        judge([Wrong], ["a", "b"])


@pytest.mark.parametrize(
    ("funcs", "weights", "told"),
    [
        (["acuracy"], None, "unknown reward function 'acuracy'; did you mean 'accuracy'"),
        (
            [{"name": "cosine", "max_length": 3}],
            None,
            "no option 'max_length' .did you mean",
        ),
        ([{"name": "cosine"}], None, "'cosine' needs the option 'max_len'"),
        ([{"name": "repetition", "n_grams": "x"}], None, "n_grams is 'x': expected a whole number"),
        (
            [{"name": "format_reward", "coefficient": "x"}],
            None,
            "coefficient is 'x': expected",
        ),
        (["accuracy", "format"], [1.0], "has 1 numbers: expected 2, one for each of funcs"),
        (["accuracy", "format"], [0, 0.0], "rewards accuracy, format are all 0: expected one"),
        ([{"name": "accuracy", "weight": 0}], None, "the rewards accuracy are all 0"),
        (["accuracy"], ["x"], "the weight of reward 'accuracy' is 'x': expected a number"),
        (["accuracy"], [math.nan], "is nan: expected a number"),
    ],
)
def test_what_cannot_be_is_told_when_a_judge_is_made(
    funcs: list[Any], weights: list[Any] | None, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Judge.of(funcs, weights)


def test_accuracy() -> None:
    assert MathAccuracy()(["so \\boxed{2}", "<answer>3</answer>"], ["2", "2"]) == [1.0, 0.0]
    assert MathAccuracy()(["2"]) == [None]


def test_format() -> None:
    assert Format()(["<think>a</think>\n<answer>b</answer>", "<answer>b</answer>"]) == [1, 0]


def test_cosine_by_hand() -> None:
    reward = Cosine(max_len=4)
    ids = [[], [1, 1], [1] * 4, [1] * 9, [1, 1]]
    found = reward(["2", "2", "2", "2", "3"], response_token_ids=ids, solution=["2"] * 5)
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.5, -0.25])


def test_repetition_by_hand() -> None:
    # four trigrams, three different
    assert Repetition()(["a b c a b c", "a b", ""]) == pytest.approx([-0.25, 0.0, 0.0])


def test_soft_overlong_by_hand() -> None:
    reward = SoftOverlong(soft_max_length=10, soft_cache_length=4)
    lengths = [[1] * n for n in (6, 8, 10, 12)]
    assert reward(["x"] * 4, response_token_ids=lengths) == pytest.approx([0, -0.5, -1, -1.5])

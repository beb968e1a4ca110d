"""Rewards in verl's form run as they are."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from trireme.experience import Experience
from trireme.rewards.grouped import Judge, reward_group
from trireme.rewards.reward import resolve, score
from trireme.task import Task
from trireme.usercode import Refused, fault_of

ROW = {
    "prompt": [{"role": "user", "content": "6 * 7?"}],
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"level": 2},
}


def scored(function: Any, row: dict[str, Any] | None = None, **options: Any) -> Any:
    reward, notes = resolve(function, options), {}
    assert reward is not None
    parts = asyncio.run(score(Task(raw_task=row or ROW), "42", reward, notes=notes))
    return parts, notes


def test_a_function_gets_the_arguments_that_it_names() -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ):
        assert (data_source, extra_info) == ("sums", {"level": 2})
        return float(solution_str == ground_truth)

    async def compared(solution_str: str, ground_truth: str, *, scale: float = 1.0, **rest: Any):
        assert rest == {"data_source": "sums", "extra_info": {"level": 2}}
        return scale * (solution_str == ground_truth)

    assert scored(compute_score) == ({"compute_score": 1.0}, {})
    assert scored(compared, scale=0.5) == ({"compared": 0.5}, {})
    with pytest.raises(ValueError, match="'compute_score' has no option 'scale'"):
        scored(compute_score, scale=2)


@pytest.mark.parametrize(
    "asks", [lambda info: info["num_turns"], lambda info: info.get("num_turns", 0)]
)
def test_a_count_of_turns_that_verl_adds_is_refused_with_what_has_it(asks: Any) -> None:
    """It was a KeyError, or counted as the default without a word; without the column, None."""

    def compute_score(solution_str: str, ground_truth: str, extra_info: Any) -> float:
        assert extra_info.get("tool", "none") == "none"
        return 0.1 * asks(extra_info)

    less = {name: value for name, value in ROW.items() if name != "extra_info"}
    for row in (ROW, less):
        with pytest.raises(Refused, match=r"no 'num_turns' here: .*rollout_infos have the model's"):
            scored(compute_score, row)
    assert scored(compute_score, less | {"extra_info": {"num_turns": 2}})[0] == {
        "compute_score": 0.2
    }


def test_the_score_of_a_dictionary_counts_and_the_rest_are_metrics() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
        return {"score": 0.5, "acc": True, "pred": solution_str}

    assert scored(compute_score) == ({"score": 0.5}, {"acc": 1.0})


def test_a_function_of_batches_gets_a_batch_of_one() -> None:
    def compute_score_batch(
        data_sources: list[str], solution_strs: list[str], ground_truths: list[str],
        extra_infos: list[Any], scale: float = 1.0, **rest: Any,
    ) -> list[Any]:  # fmt: skip
        assert (data_sources, extra_infos, rest) == (["sums"], [{"level": 2}], {})
        pairs = zip(solution_strs, ground_truths, strict=True)
        return [{"score": scale * (said == truth), "acc": said == truth} for said, truth in pairs]

    assert scored(compute_score_batch, scale=0.5) == ({"score": 0.5}, {"acc": 1.0})

    def array(solution_strs: list[str], ground_truths: list[str]) -> Any:
        return np.array([0.5 for _ in solution_strs])

    assert scored(array) == ({"array": 0.5}, {})

    def wrong(solution_strs: list[str], ground_truths: list[str], scores: Any = None) -> Any:
        return scores

    for scores, shown in (
        (1.0, r"1\.0"),
        ([1, 2], r"\[1, 2\]"),
        ({"score": 1}, "{'score': 1}"),
        (np.ones(()), "array"),
    ):
        with pytest.raises(ValueError, match=rf"'wrong' gave {shown}.*: expected a list of 1"):
            scored(wrong, scores=scores)


def test_in_a_conversation_the_text_is_that_of_all_turns() -> None:
    said: list[str] = []

    def compute_score(solution_str: str, ground_truth: str) -> float:
        said.append(solution_str)
        return 1.0

    def last(task: Task, answer: str) -> float:
        said.append(answer)
        return 1.0

    talk = "ask<|end|><|tool|>7<|end|><|assistant|>42"
    turns = Experience([1, 2], prompt_length=1, response_text=f"{talk}<|end|>")
    turns.info |= {"completion": "42", "rollout_infos": {"num_turns": 2}}
    program = Experience([1, 2], prompt_length=1, response_text="7 42")
    program.info |= {"completion": "42"}  # the output of an agent
    for experience in (turns, program):
        task = Task(ROW)
        asyncio.run(reward_group(Judge.of([compute_score, last]), task, [experience], []))
    assert said == [talk, "42", "42", "42"]


def test_a_row_without_a_reward_model_has_its_truth_elsewhere() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    assert scored(compute_score, {"prompt": "6 * 7?", "response": 42})[0] == {"compute_score": 1.0}


def test_an_error_names_the_line_of_the_function() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        scored(compute_score)
    assert "test_rewards.py" in str(fault_of(caught.value)) and "1 / 0" in str(
        fault_of(caught.value)
    )

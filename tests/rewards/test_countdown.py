from __future__ import annotations

import json

import pytest

from trireme.rewards.math import countdown_reward
from trireme.task import Task

TRUTH = {"target": 24, "numbers": [4, 6, 10, 10]}


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("<answer>(4 * 6) * 10 / 10</answer>", 1.0),
        ("<answer>4 * 6 + 10 - 10 = 24</answer>", 1.0),
        ("<answer>4 × 6 + 10 - 10</answer>", 1.0),  # noqa: RUF001
        ("<answer>1</answer> no: <answer>6 / (4 / (10 + 10 - 4))</answer>", 0.1),
        ("<answer>4 * 6</answer>", 0.1),
        ("<answer>4 + 6 + 10 + 10</answer>", 0.1),
        ("<answer>4 ** 6 + 10 + 10</answer>", 0.1),
        ("<answer>4 * 6 + 10 / (10 - 10)</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer>" + "(" * 5000 + "</answer>", 0.1),
        ("<answer>4 6 10 10</answer>", 0.1),
        ("24", 0.0),
    ],
)
def test_countdown(reply: str, value: float) -> None:
    assert countdown_reward(Task({"response": TRUTH}), reply) == {"score": value}


def test_the_puzzle_may_stand_in_json_or_in_columns() -> None:
    reply = "<answer>4 * 6 + 10 - 10</answer>"
    assert countdown_reward(Task({"response": json.dumps(TRUTH)}), reply) == {"score": 1.0}
    assert countdown_reward(Task({"target": 24, "nums": [4, 6, 10, 10]}), reply) == {"score": 1.0}


def test_a_row_without_a_puzzle_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="needs a target and its numbers"):
        countdown_reward(Task({"response": "24"}), "<answer>24</answer>")

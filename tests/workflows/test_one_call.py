from __future__ import annotations

import json
from typing import Any

import pytest

from tests.workflows.test_single_turn import run
from trireme import Task
from trireme.rewards.math import tool_call_reward
from trireme.workflows.workflow import resolve

ANN = {"name": "send", "arguments": {"to": "Ann", "text": "late"}}
MILK = {"name": "buy", "arguments": {"item": "milk", "count": 2}}
ROW = {
    "raw_system": "You call tools.",
    "tools": json.dumps([{"name": "send"}, {"name": "buy"}]),
    "conversations": [
        {"from": "human", "value": "Tell Ann, buy milk."},
        {"from": "function_call", "value": {"name": "look"}},
        {"from": "observation", "value": "no milk"},
    ],
    "answer": json.dumps([ANN, MILK]),
}


def reply(calls: Any, thought: str = "<think>hm</think>") -> str:
    return (
        f"{thought}<tool_call>{calls if isinstance(calls, str) else json.dumps(calls)}</tool_call>"
    )


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (reply([MILK, ANN]), 1),  # in any order
        (reply(json.dumps(json.dumps([ANN, MILK]))), 1),  # JSON in a text
        ("<think>a</think><tool_call>[]</tool_call>" + reply([ANN, MILK], ""), 1),  # the last one
        (reply([ANN, MILK], ""), 0),
        (reply([ANN, MILK]) + "<think>more</think>", 0),
        ("<tool_call>[]</tool_call>" + reply([ANN, MILK]), 0),  # called before it had thought
        (reply([ANN]), 0),
        (reply([ANN, ANN, MILK]), 0),
        (reply([ANN, {**MILK, "arguments": {"item": "milk", "count": "2"}}]), 0),
        (reply([ANN, "buy"]), 0),
        (reply([ANN, {"name": "buy"}]), 0),
        (reply("[{"), 0),
        (reply("3"), 0),
        ("<think>hm</think>nothing", 0),
    ],
)
def test_calls_are_compared_as_a_whole(text: str, reward: float) -> None:
    assert tool_call_reward(Task(raw_task=ROW), text) == {"tool_calls": reward}


@pytest.mark.parametrize(("text", "reward"), [(reply([]), 1), ("<think>hm</think>no", 0)])
def test_no_call_is_right_where_none_is_expected(text: str, reward: float) -> None:
    assert tool_call_reward(Task(raw_task={**ROW, "answer": "[]"}), text)["tool_calls"] == reward


def test_one_call_needs_no_list() -> None:
    assert tool_call_reward(Task(raw_task={"answer": [ANN]}), reply(ANN))["tool_calls"] == 1


@pytest.mark.parametrize("name", ["tool_call_workflow", "toolcall_workflow"])
def test_the_model_sees_tools_and_what_was_said(name: str) -> None:
    experience, prompt = run(name, [reply([ANN, MILK])], raw_task=ROW)
    assert experience.reward == 1.0
    assert prompt.startswith("<|im_start|>system\nYou call tools.")
    assert '{"type": "function", "function": {"name": "buy"}}' in prompt
    turns = "user\nTell Ann, buy milk.", 'assistant\n{"name": "look"}', "tool\nno milk"
    said = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert prompt.endswith(said + "<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"conversations": []}, "column 'conversations' is \\[\\]"),
        ({"conversations": [{"from": "robot", "value": ""}]}, "'from' to be one of human"),
        ({"tools": "{}"}, "column 'tools' is '{}': expected a JSON list"),
        ({"tools": "[{"}, "column 'tools' holds text that is not JSON: Expecting property name"),
        (
            {"tools": '[{"name": "f", "name": "g"}]'},
            "column 'tools' holds text that is not JSON: an object has the name 'name' more than",
        ),
        ({"answer": "none"}, "column 'answer' is 'none': expected a JSON list of calls"),
        ({"answer": None}, "column 'answer' is None"),
    ],
)
def test_a_row_without_its_columns_is_refused(changed: dict[str, Any], says: str) -> None:
    examine = resolve("tool_call_workflow").examine
    assert examine is not None
    examine(Task(raw_task=ROW))
    with pytest.raises(ValueError, match=says):
        examine(Task(raw_task={**ROW, **changed}))

"""The rewards of ms-swift's names, by hand."""

from __future__ import annotations

import pytest

from trireme.ext.swift.rewards import MathORM, ReactFormat, ReactORM


def test_react_format() -> None:
    assert ReactFormat()(["<think>a</think>Action: x\nAction Input: y", "Action: x"]) == [1, 0]


def act(name: str, given: str) -> str:
    return f"<think>hm</think>\nAction: {name}\nAction Input: {given}"


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (act("find", '{"city": "Rome", "days": 2}'), 1),
        (act("find", '{"days": 2,\n"city": "Rome"}') + "<|im_end|>", 1),
        (act("find", '{"city": "Rome", "days": 2}') + "\nObservation:", 1),
        (act("look", "{}") + "\n" + act("find", '{"city": "Rome", "days": 2}'), 1),
        (act("look", '{"city": "Rome", "days": 2}'), 0),
        (act("find", '{"city": "Rome"}'), 0),
        (act("find", '{"city": "Rome", "days": 2, "more": 0}'), 0),
        (act("find", "Rome"), 0),
        ("Action: find", 0),
        ("", 0),
        (act("find", "[" * 200_000), 0),
    ],
)
def test_toolbench_compares_the_last_action_and_its_input(said: str, right: float) -> None:
    truth = act("find", '{"city": "Rome", "days": 2}')
    assert ReactORM()([said], solution=[truth]) == [right]


def test_toolbench_without_json() -> None:
    reward = ReactORM()
    assert reward([act("find", " Rome ")], solution=[act("find", "Rome")]) == [1.0]
    assert reward([act("find", '["Rome"]')], solution=[act("find", "Rome")]) == [0.0]
    assert reward(["Action: find"], solution=["Action: find\nAction Input: {}"]) == [1.0]
    assert reward(["nothing"], solution=["nothing else"]) == [1.0]  # neither acts
    assert reward(["Action: find"]) == [None]


def test_math_compares_what_is_boxed() -> None:
    reward = MathORM()
    texts = [r"so \boxed{\frac{1}{2}}", "0.5", "a # Answer 0.50", "a 0.5 b 0.7", r"\boxed{2}"]
    solution = [r"it is \boxed{0.5}"] * 4 + ["# Answer 3"]
    assert reward(texts, solution=solution) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert reward(["1"]) == [None]

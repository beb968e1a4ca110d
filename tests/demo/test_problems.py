"""The demo's problems are right, different, split cleanly and written in GSM8K's shape."""

from __future__ import annotations

import re

import pytest

from trireme.demo.problems import TEMPLATES, make_problems


def skeleton(question: str) -> tuple[str, ...]:
    """A question without its names and things: the verbs of its story and its numbers."""
    return tuple(re.findall(r"\d+|buys|finds|wants|boxes|bags|shares|gives|fewer|loses", question))


def test_every_equation_is_true_and_the_last_one_gives_the_result() -> None:
    for problem in make_problems(1500, seed=0):
        *steps, last = problem["answer"].split("\n")
        assert 2 <= len(steps) <= 3
        for step in steps:
            equation = re.search(r"(\d+) ([-+*/]) (\d+) = (\d+)\.$", step)
            assert equation is not None, step
            left, operator, right, result = equation.groups()
            p, q = int(left), int(right)
            assert int(result) == {"+": p + q, "-": p - q, "*": p * q, "/": p // q}[operator]
            assert operator != "/" or p % q == 0
        assert last == f"#### {result}"


def test_results_stay_between_1_and_the_largest() -> None:
    for problem in make_problems(1000, seed=1, number=7, largest=12):
        results = [int(found) for found in re.findall(r"= (\d+)", problem["answer"])]
        assert all(1 <= result <= 12 for result in results)


def test_no_two_problems_share_a_story_and_its_numbers() -> None:
    problems = make_problems(2500, seed=0, number=7, largest=12)
    assert len({skeleton(problem["question"]) for problem in problems}) == len(problems)


def test_the_same_seed_gives_the_same_problems_and_another_seed_others() -> None:
    assert make_problems(50, seed=3) == make_problems(50, seed=3)
    assert make_problems(50, seed=3) != make_problems(50, seed=4)


def test_every_template_is_used_equally_while_it_lasts() -> None:
    questions = [problem["question"] for problem in make_problems(20 * len(TEMPLATES), seed=0)]
    assert sum("equally" in question for question in questions) == 20
    assert sum("wants" in question for question in questions) == 20


def test_asking_for_more_problems_than_there_are_says_how_many_there_are() -> None:
    with pytest.raises(ValueError, match=r"100000 problems asked for.* give \d+ different ones"):
        make_problems(100_000, seed=0)


def test_a_range_without_problems_says_so() -> None:
    with pytest.raises(ValueError, match="give 0 different ones"):
        make_problems(1, seed=0, number=1, largest=3)

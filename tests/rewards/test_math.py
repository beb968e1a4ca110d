from __future__ import annotations

import asyncio
import threading

import pytest

from trireme.rewards import answers
from trireme.rewards.answers import boxed, final_answer, final_truth, number, same
from trireme.rewards.math import accuracy_reward, format_reward, math_boxed_reward, math_reward
from trireme.rewards.reward import resolve, score
from trireme.task import Task

GSM8K = "She has 5 * 8 = <<5*8=40>>40 and 2 more.\n#### 42"


def task(truth: object) -> Task:
    return Task(raw_task={"prompt": "?", "response": truth})


@pytest.mark.parametrize(
    ("reply", "truth", "right"),
    [
        ("<think>\n6 * 7\n</think>\n<answer>\n42\n</answer>", GSM8K, True),
        ("The answer is 42.", GSM8K, True),
        ("It is \\boxed{42}, not 41", "42", True),
        ("so 5 and 8 make 40\n#### 42", GSM8K, True),
        ("<answer>$42.00</answer>", "42", True),
        ("<answer>1,200</answer>", "#### 1200", True),
        ("<answer>72 clips</answer>", "72", True),
        ("<answer>x = 72</answer>", "72", True),
        ("<answer>0.5</answer>", "\\frac{1}{2}", True),
        ("<answer>\\frac{2}{4}</answer>", "1/2", True),
        ("<answer>1+x^2</answer>", "x^2+1", True),
        ("<answer>-3</answer>", "3", False),
        ("<answer>43</answer>", GSM8K, False),
        ("no number at all", GSM8K, False),
        ("", GSM8K, False),
        ("<answer></answer>", GSM8K, False),
    ],
)
def test_accuracy(reply: str, truth: str, right: bool) -> None:
    assert accuracy_reward(task(truth), reply) == {"accuracy": float(right)}


@pytest.fixture
def no_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(answer: str, truth: str) -> bool:
        raise AssertionError(f"algebra for {answer} and {truth}")

    monkeypatch.setattr(answers, "_verify", verify)


@pytest.mark.usefixtures("no_algebra")
def test_plain_numbers_need_no_algebra() -> None:
    with pytest.raises(AssertionError, match="algebra"):
        same("x+2", "x+1")
    reply = "thinking " * 2000 + "<answer>1234</answer>"
    assert accuracy_reward(task(GSM8K), reply) == {"accuracy": 0.0}


@pytest.mark.usefixtures("no_algebra")
@pytest.mark.parametrize(
    "answer", ["9^{9^{9^9}}", "2^{99999999}", "99999999!", "9**9**9", "((((" * 100, "\\frac{" * 60]
)
def test_what_would_take_for_ever_is_wrong_at_once(answer: str) -> None:
    assert not same(answer, "x+1")


def test_algebra_works_outside_the_main_thread() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(same("2*(x+3)", "2x+6")))
    thread.start()
    thread.join()
    assert found == [True]


def test_results_are_found_where_they_stand() -> None:
    assert boxed("\\boxed{1} then \\boxed{\\frac{1}{2}} and \\boxed{open") == "\\frac{1}{2}"
    assert final_truth(GSM8K) == "42" and final_truth(7) == "7"
    with pytest.raises(ValueError, match="is a dictionary with style, ground_truth: expected text"):
        final_truth({"style": "rule", "ground_truth": "42"})
    assert final_answer("3 bags of 42kg") == "42"
    assert final_answer("<answer>\\boxed{7}</answer>") == "7"
    assert number("12%") == 12 and number("1,2") is None and number("3/0") is None


def test_math_reward_is_accuracy_and_a_little_for_the_shape() -> None:
    shaped = "<think>\n6 * 7\n</think>\n<answer>\n42\n</answer>"
    assert math_reward(task(GSM8K), shaped) == {"accuracy": 1.0, "format_score": 0.1}
    assert math_reward(task(GSM8K), "42") == {"accuracy": 1.0, "format_score": -0.1}


def test_boxed_reward_may_ask_for_thinking() -> None:
    answer = "It is \\boxed{42}"
    assert math_boxed_reward(task(GSM8K), answer) == {"accuracy": 1.0, "format_score": 0.0}
    assert math_boxed_reward(task(GSM8K), "42")["accuracy"] == 0.0
    asked = math_boxed_reward(task("42"), answer, with_think=True, format_score_coef=0.2)
    assert asked == {"accuracy": 1.0, "format_score": -0.2}
    thought = math_boxed_reward(task("42"), f"<think>hm</think> {answer}", with_think=True)
    assert thought == {"accuracy": 1.0, "format_score": 0.0}


@pytest.mark.parametrize(
    ("reply", "good"),
    [
        ("<think>\na\n</think>\n<answer>\nb\n</answer>", True),
        ("<think>a</think><answer>b</answer>", False),
        ("<think>\na\n</think>\n<answer>\nb\n</answer> and more", False),
        ("<answer>\nb\n</answer>", False),
    ],
)
def test_format(reply: str, good: bool) -> None:
    assert format_reward(task(""), reply) == {"format_score": 0.1 if good else -0.1}


def test_dapo_punishes_length_along_a_line() -> None:
    options = {
        "enable_overlong_penalty": True,
        "penalty_factor": 2.0,
        "max_response_length": 10,
        "cache_length": 4,
    }
    given = resolve("math_dapo_reward", options)
    assert given is not None

    def penalty(length: int) -> float:
        parts = asyncio.run(score(task("42"), "\\boxed{42}", given, [0] * length))
        assert parts["accuracy"] == 1.0
        return parts["format_score"]

    assert [penalty(n) for n in (1, 6, 7, 9, 10, 12)] == [0, 0, -0.5, -1.5, -2.0, -2.0]
    with pytest.raises(ValueError, match="needs max_response_length and a cache_length"):
        resolve("math_dapo_reward", {"enable_overlong_penalty": True})
    plain = resolve("math_dapo_reward")
    assert plain is not None
    found = asyncio.run(score(task("42"), "it is 41", plain, [0] * 99))
    assert found == {"accuracy": 0.0, "format_score": 0.0}


@pytest.mark.parametrize(
    ("reply", "truth", "right"),
    [
        (r"The answer is \frac{1}{10}", "10", False),
        (r"The answer is \frac{1}{10}", "0.1", True),
        (r"so \sqrt{3}", "3", False),
        ("$2^{10}$", "10", False),
        ("$2^{10}$", "1024", True),
        ("1e3", "1", False),
        ("1e3", "1000", True),
        (r"$\frac{3}{4}$", "0.75", True),
        ("答案是x^2", "2", False),
        ("答案是x^2", "x^2", True),
        (r"\(x = 7\)", "7", True),
        ("It costs $5 and $7.", "7", True),
        ("$5 - $3 = $2", "2", True),
        ("The total is $12", "12", True),
        (r"The answer is $x=3$ so 4", "4", True),
        (r"$-\frac{1}{2}$", "-0.5", True),
        (r"3\sqrt{2}", r"3\sqrt{2}", True),
    ],
)
def test_latex_without_a_box_is_read_as_mathematics(reply: str, truth: str, right: bool) -> None:
    assert answers.same(answers.final_answer(reply), answers.final_truth(truth)) is right


@pytest.mark.parametrize("form", [r"\frac{{{a}}}{{{b}}}", r"$\frac{{{a}}}{{{b}}}$", "{a}/{b}"])
@pytest.mark.parametrize("text", ["{}", "The answer is {}.", "First 7, then {}", r"So \({}\)"])
def test_fractions_in_every_form_are_what_they_are_and_nothing_else(form: str, text: str) -> None:
    if "(" in text and "$" in form:
        return
    for a in range(1, 8):
        for b in range(2, 8):
            reply = text.format(form.format(a=a, b=b))
            assert answers.same(answers.final_answer(reply), f"{a}/{b}"), reply
            assert answers.same(answers.final_answer(reply), str(b)) is (a == b * b), reply


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("\\frac12", "\\frac{1}{2}"),
        ("2\\frac12x+\\frac{3}{4}", "2\\frac{1}{2}x+\\frac{3}{4}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("\\frac1", "\\frac1"),
        ("\\dfrac12", "\\dfrac12"),
    ],
)
def test_fractions_get_their_braces(text: str, whole: str) -> None:
    assert answers.whole_fractions(text) == whole


def test_what_is_in_a_box_is_graded_and_units_are_left_off() -> None:
    assert answers.boxed_or_all("<think>\\boxed{1}</think>so \\boxed{ 5 }") == (True, "5")
    assert answers.boxed_or_all("<think>\\boxed{1}</think>five") == (False, "five")
    assert answers.graded("$1,200$", "1200") == (True, "1,200")
    assert answers.graded(None, "1") == (False, "")
    assert answers.without_unit("5\\text{ cm}") == "5"
    assert answers.thinks("a<think>b</think>")
    assert not answers.thinks("</think><think>") and not answers.thinks("")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\boxed{a \boxed{b c}", "b c"),
        (r"} \boxed{} }", ""),
        (r"{\boxed{x}", "x"),
        (r"\boxed {x} \Boxed{x} boxed{x}", None),
        (r"\boxed{" * 100_000, None),
        (r"\boxed{" * 50_000 + "7" + "}" * 50_000, "7"),
    ],
    ids=lambda text: f"{text!s:.20}",
)
def test_the_last_whole_box_is_found_in_one_pass(text: str, inside: str | None) -> None:
    """A model that says the beginning of a box again and again took minutes of the loop's time."""
    assert boxed(text) == inside


@pytest.mark.parametrize(
    ("reply", "truth", "right"),
    [
        ("\\boxed{\u22125}", "-5", True),
        ("\\boxed{\u22125}", "5", False),
        ("The answer is \u22125.", "-5", True),
        ("<answer>x = \u22125</answer>", "5", False),
        ("5", "\u22125", False),
        ("-5", "\u22125", True),
        ("<answer>**5**</answer>", "5", True),
        ("#### **5**", "5", True),
        ("\\boxed{**5**}", "5", True),
        ("<answer>**$18**</answer>", "18", True),
        ("<answer>60 km/h</answer>", "60", True),
        ("<answer>$15/day</answer>", "15", True),
        ("<answer>24 miles/hour</answer>", "24", True),
        ("<answer>12 ft^2</answer>", "12", True),
        ("<answer>3/4 cup</answer>", "3/4", True),
        ("<answer>3/4 cup</answer>", "3", False),
        ("<answer>5 x^2</answer>", "5", False),
        ("<answer>5x^2</answer>", "5", False),
        ("<answer>5/x</answer>", "5", False),
        ("<answer>60 km/h</answer>", "6", False),
        ("\\boxed{x > 5}", "5", False),
        ("<answer>x != 5</answer>", "5", False),
        ("<answer>72 clips!</answer>", "72", True),
        ("<answer>BAC</answer>", "ABC", False),
        ("<answer>ABC</answer>", "ABC", True),
        ("<answer>listen</answer>", "silent", False),
        ("<answer>paris</answer>", "Paris", True),
        ("<answer>ba</answer>", "ab", True),
        ("<answer>2yx</answer>", "2xy", True),
    ],
)
def test_signs_bold_units_and_words_are_read_as_people_read_them(
    reply: str, truth: str, right: bool
) -> None:
    assert answers.same(answers.final_answer(reply), answers.final_truth(truth)) is right


@pytest.mark.parametrize(
    "mathematics",
    [
        "\\(x\\)",
        "\\[x\\]",
        "$$x$$",
        "$x$",
        "x^2",
        "2^{10}",
        "\\frac{1}{2}",
        "3\\pi",
        "1e5",
        "2.5E-3",
    ],
)
def test_no_mathematics_is_passed_over(mathematics: str) -> None:
    """Most replies have none, and are not searched for it: what decides that must see all kinds."""
    assert answers._last_formula(f"that makes {mathematics}") is not None

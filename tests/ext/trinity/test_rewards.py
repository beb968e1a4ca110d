"""Rewards in Trinity-RFT's class form score as those of the YAML's names, also in subclasses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trireme.ext.trinity import rewards as forms
from trireme.ext.trinity.classes import gather_metrics
from trireme.rewards.reward import resolve, score
from trireme.task import Task

SHAPED = "<think>\na\n</think>\n<answer>\n{}\n</answer>"


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (forms.MathRewardFn, "math_reward"),
        (forms.MathBoxedRewardFn, "math_boxed_reward"),
        (forms.AccuracyReward, "accuracy_reward"),
        (forms.CountDownRewardFn, "countdown_reward"),
        (forms.MathDAPORewardFn, "math_dapo_reward"),
    ],
)
@pytest.mark.parametrize(
    "reply",
    ["7", "\\boxed{7}", SHAPED.format("7"), SHAPED.format("6"), SHAPED.format("3 + 4"), "x"],
)
def test_a_class_scores_as_the_name_does(form: type, name: str, reply: str) -> None:
    truth = '{"target": 7, "numbers": [3, 4]}' if "countdown" in name else "7"
    by_name = resolve(name)
    assert by_name is not None
    task = Task({"prompt": "3 and 4?", "response": truth})
    wanted = asyncio.run(score(task, reply, by_name))
    assert form()(response=reply, truth=truth) == wanted
    by_class = resolve(form)  # as a plug-in names it, or what it derives from it
    assert by_class is not None and asyncio.run(score(task, reply, by_class)) == wanted


def test_a_class_of_a_plug_in_calls_the_one_that_it_is_derived_from() -> None:
    class Doubled(forms.MathBoxedRewardFn):
        def __call__(
            self, response: str, truth: str | None = None, **more: Any
        ) -> dict[str, float]:
            return {k: 2 * v for k, v in super().__call__(response, truth, **more).items()}

    reward = resolve(Doubled, {})
    assert reward is not None
    task = Task({"prompt": "", "response": "7"})
    assert asyncio.run(score(task, "\\boxed{7}", reward)) == {"accuracy": 2.0, "format_score": 0.0}


def test_options_of_the_classes_have_effect() -> None:
    boxed = forms.MathBoxedRewardFn()
    assert boxed("\\boxed{7}", "7", with_think=True, format_score_coef=0.3)["format_score"] == -0.3
    assert boxed("\\boxed{7}", "7", with_think=False)["format_score"] == 0.0
    assert forms.FormatReward(r"\d+")("7") == {"format_score": 0.1}
    assert forms.FormatReward(r"\d+")("x") == {"format_score": -0.1}
    last = forms.AccuracyReward(lambda text: text.split()[-1])
    assert (last("it is 7", truth="7"), last("7 it is", truth="7")) == (
        {"accuracy": 1.0},
        {"accuracy": 0.0},
    )
    numbers = forms.AccuracyReward(lambda text: [int(word) for word in text.split()])
    assert numbers("1 2", truth="1 2") == {"accuracy": 1.0}
    long = forms.MathDAPORewardFn(
        enable_overlong_penalty=True, penalty_factor=1.0, max_response_length=4, cache_length=2
    )
    assert long("7", response_token=[1] * 5, truth="7") == {"accuracy": 1.0, "format_score": -1.0}


def test_helpers_say_what_those_of_the_same_name_say() -> None:
    assert forms.verify_math_answer("so \\boxed{0.5}", "\\boxed{\\frac{1}{2}}")[0] == 1.0
    right, details = forms.verify_math_answer("so 4", "5")
    assert right == 0.0 and details == {
        "parsed_prediction": "4",
        "ground_truth": "5",
        "is_correct": False,
    }
    assert forms.compute_score_v0("\\boxed{5}", "\\boxed{5}") == 1.0
    assert forms.compute_score_v0("5", "5") == 0.0
    assert forms.compute_score("so \\boxed{5}", "5") == (1.0, "5")
    assert forms.is_equiv("0.5", "1/2") and forms.is_equiv(None, None)
    assert not forms.is_equiv("1", None)
    assert forms.last_boxed_only_string("a \\boxed{\\frac{1}{2}}.") == "\\boxed{\\frac{1}{2}}"
    assert forms.remove_boxed("\\boxed{7}") == "7"
    with pytest.raises(ValueError, match="has no"):
        forms.remove_boxed("7")
    assert forms.extract_solution("<answer>1</answer>\n<answer> 3 + 4 </answer>") == "3 + 4"
    assert forms.extract_solution("3 + 4") is None
    assert forms.validate_equation("3 + 4", [4, 3]) and not forms.validate_equation("3 + 3", [3, 4])
    assert forms.evaluate_equation("(3 + 4) / 2") == 3.5
    assert forms.evaluate_equation("__import__('os')") is None
    assert forms.evaluate_equation("1 / 0") is None


def test_metrics_are_gathered_under_their_names() -> None:
    rows = [{"a": 1, "text": "x"}, {"a": 3.0, "b": True}]
    assert gather_metrics(rows, "group") == {
        "group/a/mean": 2.0,
        "group/a/max": 3.0,
        "group/a/min": 1.0,
        "group/b/mean": 1.0,
        "group/b/max": 1.0,
        "group/b/min": 1.0,
    }
    assert gather_metrics(rows, "g", ["std"])["g/a/std"] == pytest.approx(2**0.5)
    assert gather_metrics([], "g") == {}
    with pytest.raises(ValueError, match="expected some of mean"):
        gather_metrics(rows, "g", ["median"])

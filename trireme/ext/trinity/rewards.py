"""Trinity: rewards in the class form of Trinity-RFT, and the helpers that its plug-ins import.

The classes are those rewards of ours of the same name, called as there with a reply and its truth,
to be used in a plug-in's own reward or subclassed. The YAML's names stand for the functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from trireme.rewards.answers import boxed, final_answer, final_truth, graded, plain, same
from trireme.rewards.math import (
    MathDapo,
    countdown_reward,
    format_reward,
    math_boxed_reward,
    uses,
    value_of,
)
from trireme.rewards.reward import RewardFn
from trireme.task import Task

_ANSWER = re.compile(r"<answer>(.*?)</answer>")


class AccuracyReward(RewardFn):
    """1 where a reply's result is the right one."""

    def __init__(self, answer_parser: Callable[[str], Any] | None = None) -> None:
        """`answer_parser` extracts the result from a text; not given: as `accuracy_reward` does."""
        self.answer_parser = answer_parser

    def __call__(
        self, response: str, prompt: str | None = None, truth: str | None = None
    ) -> dict[str, float]:
        """Score whether the response's answer equals `truth`: 1 or 0."""
        if self.answer_parser is None:
            return {"accuracy": float(same(final_answer(response), final_truth(truth)))}
        found, wanted = (self.answer_parser(text) for text in (response, str(truth)))
        if isinstance(found, str) and isinstance(wanted, str):
            return {"accuracy": float(same(found, wanted))}
        return {"accuracy": float(found is not None and found == wanted)}


class FormatReward(RewardFn):
    """0.1 for a reply of the right shape, else -0.1."""

    def __init__(self, pattern: str | None = None) -> None:
        """`pattern`: the required form; by default <think> and <answer> on separate lines."""
        self.pattern = re.compile(pattern, re.DOTALL | re.MULTILINE) if pattern else None

    def __call__(self, response: str) -> dict[str, float]:
        """Score the response's format."""
        if self.pattern is None:
            return format_reward(_task(None), response)
        return {"format_score": 0.1 if self.pattern.match(response) else -0.1}


class MathRewardFn(RewardFn):
    """`math_reward`: a reply's result, and its shape."""

    def __init__(
        self, answer_parser: Callable[[str], Any] | None = None, pattern: str | None = None
    ) -> None:
        self.accuracy_reward = AccuracyReward(answer_parser)
        self.format_reward = FormatReward(pattern)

    def __call__(
        self, response: str, prompt: str | None = None, truth: str | None = None
    ) -> dict[str, float]:
        """Score the response's accuracy and format."""
        return {**self.accuracy_reward(response, prompt, truth), **self.format_reward(response)}


class MathBoxedRewardFn(RewardFn):
    """`math_boxed_reward`: the result in \\boxed{}."""

    def __init__(self, **options: Any) -> None:
        """Options are those of the call."""

    def __call__(
        self,
        response: str,
        truth: str | None = None,
        with_think: bool | None = False,
        format_score_coef: float | None = 0.1,
        **more: Any,
    ) -> dict[str, float]:
        """Score the boxed result; `with_think` lowers the score of a reply that no <think> block
        begins.
        """
        score = 0.1 if format_score_coef is None else format_score_coef
        return math_boxed_reward(
            _task(truth), response, with_think=bool(with_think), format_score_coef=score
        )


class CountDownRewardFn(RewardFn):
    """`countdown_reward`; the truth is JSON with target and numbers."""

    def __call__(
        self, response: str, prompt: str | None = None, truth: str | None = None
    ) -> dict[str, float]:
        """Score the response's equation against the task in `truth`."""
        return countdown_reward(_task(truth), response)


class MathDAPORewardFn(MathDapo):
    """`math_dapo_reward`, called with the truth in place of a task."""

    def __call__(
        self, response: str, response_token: Sequence[int] = (), truth: Any = None, **more: Any
    ) -> dict[str, float]:
        """Score the response as `MathDapo` does."""
        return super().__call__(response, _task(truth), response_token)


def _task(truth: Any) -> Task:
    return Task({"response": truth})


def verify_math_answer(response_text: str, ground_truth: Any) -> tuple[float, dict[str, Any]]:
    """Return 1 if a reply's result is right, else 0, and the compared values."""
    found, wanted = final_answer(str(response_text)), final_truth(ground_truth)
    wanted = final_answer(wanted) or wanted
    right = same(found, wanted)
    details = {"parsed_prediction": found, "ground_truth": wanted, "is_correct": right}
    return float(right), details


def compute_score_v0(solution_str: str, ground_truth: Any) -> float:
    """Return 1 if \\boxed{} contains the right result, which may itself be in \\boxed{}."""
    wanted = boxed(str(ground_truth))
    return math_boxed_reward(_task(ground_truth if wanted is None else wanted), solution_str)[
        "accuracy"
    ]


def compute_score(solution_str: str, ground_truth: Any) -> tuple[float, str]:
    """Return 1 if the result at the end of a reply is right, else 0, and that result."""
    found = final_answer(str(solution_str)) or ""
    right, bare = graded(found, final_truth(ground_truth))
    return float(right), bare


def is_equiv(str1: str | None, str2: str | None) -> bool:
    """Return whether two results are mathematically equal; two missing ones are."""
    return str1 is str2 if None in (str1, str2) else same(plain(str(str1)), plain(str(str2)))


def last_boxed_only_string(string: str) -> str | None:
    """Return the last \\boxed{...} of a text, unchanged."""
    inside = boxed(string)
    return None if inside is None else f"\\boxed{{{inside}}}"


def remove_boxed(text: str) -> str:
    """Return the content of a boxed text. Raises ValueError for any other text."""
    inside = boxed(text)
    if inside is None:
        raise ValueError(f"{text!r:.60} has no \\boxed{{...}}")
    return inside


def extract_solution(solution_str: str) -> str | None:
    """Return the content of the last <answer> in a reply's last line."""
    found = _ANSWER.findall(solution_str.rpartition("\n")[2])
    return found[-1].strip() if found else None


def validate_equation(equation_str: str, available_numbers: Sequence[int]) -> bool:
    """Return whether an equation uses each of the numbers once, and no other."""
    return uses(equation_str, list(available_numbers))


def evaluate_equation(equation_str: str) -> float | None:
    """Return the value of an equation of the four operations; None for any other text."""
    return None if (value := value_of(equation_str)) is None else float(value)

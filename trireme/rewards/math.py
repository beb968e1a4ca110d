"""Math: rewards for replies that end in a mathematical result, or that have a requested format."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from trireme.rewards.answers import boxed, final_answer, final_truth, plain, same, thinks
from trireme.rewards.reward import RewardFn, examined_by, needs_truth
from trireme.syntax import expression_tree
from trireme.task import Task
from trireme.text import from_json

_THINK_ANSWER = re.compile(
    r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>", re.DOTALL | re.IGNORECASE
)
_LONGEST = 200
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_CALLS = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ALLOWED = re.compile(r"[\d+\-*/() ]+")
_OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def format_reward(task: Task, answer: str, *, coefficient: float = 0.1) -> dict[str, float]:
    """+coefficient for <think> and <answer> blocks on lines of their own; else -coefficient."""
    return {"format_score": coefficient if has_think_answer(answer) else -coefficient}


def has_think_answer(reply: str) -> bool:
    """Return True if a reply is one <think> block and one <answer> block, and nothing else."""
    text = reply.strip()
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return once and _THINK_ANSWER.fullmatch(text) is not None


def thinks_once(reply: str) -> bool:
    """Return True if a reply begins with one closed <think> block and continues after it."""
    text = reply.strip()
    if text.count("<think>") != 1 or text.count("</think>") != 1:
        return False
    return text.startswith("<think>") and bool(text.rpartition("</think>")[2].strip())


@needs_truth
def accuracy_reward(task: Task, answer: str) -> dict[str, float]:
    """1 where the reply's result is the right one."""
    return {"accuracy": float(same(final_answer(answer), final_truth(task.truth)))}


@needs_truth
def math_reward(task: Task, answer: str, *, format_score_coef: float = 0.1) -> dict[str, float]:
    """1 for the right result, and plus or minus a little for <think> and <answer> blocks."""
    shaped = has_think_answer(answer)
    return {
        **accuracy_reward(task, answer),
        "format_score": format_score_coef if shaped else -format_score_coef,
    }


@needs_truth
def math_boxed_reward(
    task: Task, answer: str, *, with_think: bool = False, format_score_coef: float = 0.1
) -> dict[str, float]:
    """1 for the right result in \\boxed{}; `with_think`: less where no <think> block begins it."""
    inside = boxed(answer)
    right = inside is not None and same(plain(inside), final_truth(task.truth))
    missing = with_think and not thinks_once(answer)
    return {"accuracy": float(right), "format_score": -format_score_coef if missing else 0.0}


@needs_truth
class MathDapo(RewardFn):
    """1 for the right result; with `enable_overlong_penalty` less where the reply is too long.

    With L the longest reply, C the cache and p the factor: 0 up to L - C tokens, then
    (L - C - length) / C * p, and -p past L (soft overlong punishment of arXiv:2503.14476).
    """

    def __init__(
        self,
        *,
        enable_overlong_penalty: bool = False,
        penalty_factor: float = 1.0,
        max_response_length: int | None = None,
        cache_length: int | None = None,
    ) -> None:
        """Raises ValueError if the penalty is on without its two lengths."""
        if enable_overlong_penalty and not 0 < (cache_length or 0) <= (max_response_length or 0):
            raise ValueError(
                "reward 'math_dapo_reward': enable_overlong_penalty needs max_response_length and "
                f"a cache_length of at most that; they are {max_response_length} and {cache_length}"
            )
        self.longest, self.cache = max_response_length or 0, cache_length or 1
        self.factor = penalty_factor if enable_overlong_penalty else 0.0

    def __call__(
        self, response: str, task: Task, response_token: Sequence[int] = ()
    ) -> dict[str, float]:
        """Score the accuracy, and the format by the reply's length."""
        length, free = len(response_token), self.longest - self.cache
        share = min(max((length - free) / self.cache, 0.0), 1.0) if self.factor else 0.0
        return {**accuracy_reward(task, response), "format_score": -share * self.factor}


def _puzzle(task: Task) -> tuple[Fraction, list[int]]:
    """Return target and numbers, from the truth or from the row's columns. Raises ValueError if
    they are missing, or are not numbers.
    """
    truth: Any = task.truth
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        try:
            truth = from_json(truth)
        except ValueError as error:
            raise ValueError(
                f"countdown_reward: the row's column '{task.truth_key}' is {truth!r:.60}, which is "
                f"not JSON: {error}"
            ) from error
    row: Mapping[str, Any] = truth if isinstance(truth, Mapping) else task.raw_task
    numbers = row.get("numbers", row.get("nums"))
    target = row.get("target", truth)
    if numbers is None or target is None or isinstance(target, Mapping):
        raise ValueError(
            "countdown_reward needs a target and its numbers: the truth, or the row's columns, "
            f"must hold 'target' and 'numbers' (or 'nums'). The row has: {', '.join(task.raw_task)}"
        )
    try:
        return Fraction(str(target)), [int(number) for number in numbers]
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"countdown_reward: the target is {target!r:.60} and its numbers are {numbers!r:.60}: "
            "expected a number and a list of numbers"
        ) from error


@examined_by(_puzzle)
def countdown_reward(task: Task, answer: str, *, format_score: float = 0.1) -> dict[str, float]:
    """0 without an equation in <answer>, `format_score` for a wrong one, 1 for a right one."""
    target, numbers = _puzzle(task)
    answers = _ANSWER.findall(answer)
    if not answers:
        return {"score": 0.0}
    right = _solves(answers[-1], target, numbers)
    return {"score": 1.0 if right else format_score}


def expected_calls(task: Task) -> list[Any]:
    """Return the right calls. Raises ValueError if a row has none."""
    right = task.raw_task.get("answer", task.truth)
    try:
        calls = _call_list(right, from_json) if isinstance(right, str) else right
        _counted(calls)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the row's column 'answer' is {right!r:.60}: expected a JSON list of calls with "
            f"'name' and 'arguments' ({error})"
        ) from error
    return calls


def _call_list(text: str, read: Callable[[str], Any] = json.loads) -> Any:
    """Parse JSON, or JSON in a text of JSON; a single call becomes a list."""
    calls = read(text)
    calls = read(calls) if isinstance(calls, str) else calls
    return [calls] if isinstance(calls, dict) else calls


def _counted(calls: Any) -> Counter[tuple[str, str]]:
    """Count equal calls. Raises ValueError for anything but a list of calls."""
    whole = isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call
        for call in calls
    )
    if not whole:
        raise ValueError("no list of calls")
    return Counter((c["name"], json.dumps(c["arguments"], sort_keys=True)) for c in calls)


@examined_by(expected_calls)
def tool_call_reward(task: Task, answer: str) -> dict[str, float]:
    """1 where the last <tool_call> holds the row's calls (column `answer`), in any order, and one
    <think> block ends before the first; else 0 (Tool-N1, arXiv:2505.00024).
    """
    wanted, blocks = _counted(expected_calls(task)), list(_CALLS.finditer(answer))
    shaped = thinks(answer) and bool(blocks) and answer.index("</think>") < blocks[0].start()
    try:
        made = _counted(_call_list(blocks[-1][1])) if shaped else None
    except (ValueError, RecursionError):
        made = None  # no calls: a wrong answer
    return {"tool_calls": float(made == wanted)}


def _solves(text: str, target: Fraction, numbers: list[int]) -> bool:
    return uses(text, numbers) and value_of(text) == target


def uses(text: str, numbers: Sequence[int]) -> bool:
    """Return True if the left side of an equation has each of the numbers once, and no other."""
    left = text.partition("=")[0]
    return len(left) <= _LONGEST and (
        Counter(map(int, re.findall(r"\d+", left))) == Counter(numbers)
    )


def value_of(text: str) -> Fraction | None:
    """Return the value of the left side of an equation of the four operations; None if it
    has none.
    """
    expression = text.partition("=")[0].replace("×", "*").replace("÷", "/").strip()  # noqa: RUF001
    if len(expression) > _LONGEST or "**" in expression or "//" in expression:
        return None
    if not _ALLOWED.fullmatch(expression):
        return None
    try:
        return _value(expression_tree(expression))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None  # not an equation: a wrong answer


def _value(node: ast.expr) -> Fraction:
    """Return the value of a tree of the four operations; names, calls and powers are refused."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{type(node).__name__} is not one of the four operations")

"""Countdown: whether an equation reaches a target with each given number used exactly once."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from trireme.task import Task

_LONGEST = 200
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ALLOWED = re.compile(r"[\d+\-*/() ]+")
_OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def countdown_reward(task: Task, answer: str, *, format_score: float = 0.1) -> dict[str, float]:
    """0 without an equation in <answer>, `format_score` for a wrong one, 1 for a right one."""
    target, numbers = _puzzle(task)
    found = _ANSWER.findall(answer)
    if not found:
        return {"score": 0.0}
    right = _solves(found[-1], target, numbers)
    return {"score": 1.0 if right else format_score}


def _puzzle(task: Task) -> tuple[Fraction, list[int]]:
    """Target and numbers, from the truth or from the row's columns."""
    truth: Any = task.truth
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        truth = json.loads(truth)
    row: Mapping[str, Any] = truth if isinstance(truth, Mapping) else task.raw_task
    numbers = row.get("numbers", row.get("nums"))
    target = row.get("target", truth)
    if numbers is None or target is None or isinstance(target, Mapping):
        raise ValueError(
            "countdown_reward needs a target and its numbers: the truth, or the row's columns, "
            f"must hold 'target' and 'numbers' (or 'nums'). The row has: {', '.join(task.raw_task)}"
        )
    return Fraction(str(target)), [int(number) for number in numbers]


def _solves(text: str, target: Fraction, numbers: list[int]) -> bool:
    """Whether the equation's left side has the target's value and uses each number once."""
    expression = text.partition("=")[0].replace("×", "*").replace("÷", "/").strip()  # noqa: RUF001
    if len(expression) > _LONGEST or "**" in expression or "//" in expression:
        return False
    if not _ALLOWED.fullmatch(expression):
        return False
    if Counter(map(int, re.findall(r"\d+", expression))) != Counter(numbers):
        return False
    try:
        return _value(ast.parse(expression, mode="eval").body) == target
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False  # not an equation: a wrong answer


def _value(node: ast.expr) -> Fraction:
    """The value of a tree of the four operations; no name, call or power is looked at."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{type(node).__name__} is not one of the four operations")

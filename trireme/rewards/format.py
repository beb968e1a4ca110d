"""Format: whether a reply has the shape that it was asked for."""

from __future__ import annotations

import re

from trireme.task import Task

_THINK_ANSWER = re.compile(
    r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>", re.DOTALL | re.IGNORECASE
)


def format_reward(task: Task, answer: str, *, coefficient: float = 0.1) -> dict[str, float]:
    """+coefficient for <think> and <answer> blocks on lines of their own; else -coefficient."""
    return {"format_score": coefficient if has_think_answer(answer) else -coefficient}


def has_think_answer(reply: str) -> bool:
    """Whether a reply is one <think> block and one <answer> block, and nothing else."""
    text = reply.strip()
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return once and _THINK_ANSWER.fullmatch(text) is not None


def thinks_once(reply: str) -> bool:
    """Whether a reply begins with one closed <think> block and goes on after it."""
    text = reply.strip()
    if text.count("<think>") != 1 or text.count("</think>") != 1:
        return False
    return text.startswith("<think>") and bool(text.rpartition("</think>")[2].strip())

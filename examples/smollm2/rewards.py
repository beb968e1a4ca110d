"""The rewards of the gallery: words that are counted, constraints that are checked, sums."""

from __future__ import annotations

import re
from typing import Any

from trireme import Task

WORD = re.compile(r"[\w'’-]*\w[\w'’-]*")


def exact_words(task: Task, answer: str, *, count: int) -> float:
    """1 for exactly `count` words, and 1/count less for each word too many or too few."""
    return max(0.0, 1 - abs(len(WORD.findall(answer)) - count) / count)


def holds(rule: dict[str, Any], answer: str) -> bool:
    """Return whether an answer obeys one constraint."""
    words = [word.lower() for word in WORD.findall(answer)]
    match rule["kind"]:
        case "contains":
            return rule["word"] in words
        case "avoids":
            return bool(words) and rule["word"] not in words
        case "bullets":
            return sum(line.startswith("- ") for line in answer.splitlines()) == rule["count"]
        case "short":
            return 0 < len(words) <= rule["count"]
        case _:
            return bool(words) and answer == answer.lower()


def obeys(task: Task, answer: str, *, rules: list[dict[str, Any]]) -> dict[str, float]:
    """The share of a task's constraints that an answer obeys, and 0.5 more if it obeys all."""
    kept = [holds(rule, answer) for rule in rules]
    return {"obeyed": sum(kept) / len(kept) / 2, "all_obeyed": all(kept) / 2}


def right_sum(task: Task, answer: str) -> float:
    """1 if the last number of the answer is the right one."""
    numbers = re.findall(r"-?\d+", answer.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == str(task.truth))


def right_answer(task: Task, answer: str) -> float:
    """1 if the number after the last `Answer:` is the right one."""
    found = re.findall(r"Answer:\s*(-?\d+)", answer.replace(",", ""))
    return float(bool(found) and found[-1] == str(task.truth))

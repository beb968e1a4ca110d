"""Math: rewards for replies that end in a mathematical result."""

from __future__ import annotations

from trireme.rewards.answers import boxed, final_answer, final_truth, plain, same
from trireme.rewards.format import has_think_answer, thinks_once
from trireme.task import Task


def accuracy_reward(task: Task, answer: str) -> dict[str, float]:
    """1 where the reply's result is the right one."""
    return {"accuracy": float(same(final_answer(answer), final_truth(task.truth)))}


def math_reward(task: Task, answer: str, *, format_score_coef: float = 0.1) -> dict[str, float]:
    """1 for the right result, and plus or minus a little for <think> and <answer> blocks."""
    shaped = has_think_answer(answer)
    return {
        **accuracy_reward(task, answer),
        "format_score": format_score_coef if shaped else -format_score_coef,
    }


def math_boxed_reward(
    task: Task, answer: str, *, with_think: bool = False, format_score_coef: float = 0.1
) -> dict[str, float]:
    """1 for the right result in \\boxed{}; `with_think`: less where no <think> block begins it."""
    inside = boxed(answer)
    right = inside is not None and same(plain(inside), final_truth(task.truth))
    missing = with_think and not thinks_once(answer)
    return {"accuracy": float(right), "format_score": -format_score_coef if missing else 0.0}

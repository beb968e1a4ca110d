"""Math: rewards for replies that end in a mathematical result."""

from __future__ import annotations

from collections.abc import Sequence

from trireme.rewards.answers import boxed, final_answer, final_truth, plain, same
from trireme.rewards.format import has_think_answer, thinks_once
from trireme.rewards.reward import RewardFn
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
        """Raises ValueError where the penalty is on without its two lengths."""
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
        """See the class."""
        length, free = len(response_token), self.longest - self.cache
        share = min(max((length - free) / self.cache, 0.0), 1.0) if self.factor else 0.0
        return {**accuracy_reward(task, response), "format_score": -share * self.factor}

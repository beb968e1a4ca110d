"""ORM: reward functions that see a task's rollouts together, as classes and in TRL's form.

A class is called with `completions` (the last reply of each rollout, in run order) and a keyword
for each column of the data set's row (a list with the row's value once per rollout), and with
`messages`, `message_pictures` (by the digests that messages name), `is_truncated`, `rollout_infos`,
`response_token_ids`, `trajectory_inputs`, `auxiliary_models`. It returns a number per rollout;
None: it does not apply. An `async def __call__` is awaited concurrently with others. Rewards of one
answer (reward.py) may be among them.

A function is called in the same way, and also receives TRL's `prompts` and `completion_ids`. If the
prompt is a list of messages, each of its `completions` is one as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trireme.extensions import former_names
from trireme.rewards.answers import final_answer, final_truth, same
from trireme.rewards.reward import needs_truth

_FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


class ORM:
    """The base of reward functions of whole groups. Define `__call__`."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        """Return a number for each of `completions`."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `__call__(self, completions, **kwargs)`"
        )


class AsyncORM(ORM):
    """An ORM with an `async def __call__`, for code that uses this name."""


class Value(float):
    """A number with its own metrics to log."""

    metrics: Mapping[str, float]

    def __new__(cls, number: float, metrics: Mapping[str, float]) -> Value:
        """`metrics` by name."""
        made = super().__new__(cls, number)
        made.metrics = metrics
        return made


class Unscored(str):
    """No reward, like None, and the reason: for the error if no other function gives one; with its
    own metrics.
    """

    metrics: Mapping[str, float]

    def __new__(cls, reason: str, metrics: Mapping[str, float]) -> Unscored:
        """`metrics` by name."""
        made = super().__new__(cls, reason)
        made.metrics = metrics
        return made


@needs_truth
class MathAccuracy(ORM):
    """1 where a completion's result is that of the solution, else 0; None without a solution."""

    def __call__(
        self, completions: list[str], solution: Sequence[Any] = (), **kwargs: Any
    ) -> list[float | None]:
        """Compare final answers; None for a rollout without a solution."""
        truths = solution or [None] * len(completions)
        return [
            None if truth is None else float(same(final_answer(text), final_truth(truth)))
            for text, truth in zip(completions, truths, strict=True)
        ]


class Format(ORM):
    """1 for <think>...</think><answer>...</answer> and nothing else."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        """Match the format of each reply."""
        return [float(_FORMAT.fullmatch(text) is not None) for text in completions]


@needs_truth
class Cosine(ORM):
    """A right answer is worth less the longer it is, a wrong one costs less (arXiv:2502.03373).

    Along a half cosine from the value at no token to the value at `max_len` tokens.
    """

    def __init__(
        self,
        max_len: int,
        min_len_value_wrong: float = -0.5,
        max_len_value_wrong: float = 0.0,
        min_len_value_correct: float = 1.0,
        max_len_value_correct: float = 0.5,
    ) -> None:
        self.max_len = max_len
        self.wrong = (min_len_value_wrong, max_len_value_wrong)
        self.correct = (min_len_value_correct, max_len_value_correct)
        self._accuracy = MathAccuracy()

    def __call__(
        self, completions: list[str], response_token_ids: Sequence[Any] = (), **kwargs: Any
    ) -> list[float | None]:
        """Score each reply by its accuracy and its number of tokens."""
        accurate = self._accuracy(completions, **kwargs)
        return [
            None if right is None else self._value(len(ids), right >= 1)
            for ids, right in zip(response_token_ids, accurate, strict=True)
        ]

    def _value(self, length: int, right: bool) -> float:
        short, long = self.correct if right else self.wrong
        share = min(length, self.max_len) / self.max_len
        return short - (short - long) * (1 - math.cos(math.pi * share)) / 2


class Repetition(ORM):
    """`max_penalty` times the share of repeated n-grams of words (arXiv:2502.03373)."""

    def __init__(self, n_grams: int = 3, max_penalty: float = -1.0) -> None:
        self.n_grams = n_grams
        self.max_penalty = max_penalty

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        """Score each reply by its words, in lower case."""
        return [self._value(text.lower().split()) for text in completions]

    def _value(self, words: list[str]) -> float:
        total = len(words) - self.n_grams + 1
        if total < 1:
            return 0.0
        grams = {tuple(words[i : i + self.n_grams]) for i in range(total)}
        return (1 - len(grams) / total) * self.max_penalty


class SoftOverlong(ORM):
    """0 up to `soft_max_length - soft_cache_length` tokens, -1 at `soft_max_length`, and on along
    that line (after DAPO, arXiv:2503.14476, which stops at -1).
    """

    def __init__(self, soft_max_length: int, soft_cache_length: int) -> None:
        if not 0 < soft_cache_length < soft_max_length:
            raise ValueError(
                f"soft_overlong: soft_cache_length is {soft_cache_length}: expected more than 0 "
                f"and less than soft_max_length ({soft_max_length})"
            )
        self.free = soft_max_length - soft_cache_length
        self.cache = soft_cache_length

    def __call__(
        self, completions: list[str], response_token_ids: Sequence[Any] = (), **kwargs: Any
    ) -> list[float | None]:
        """Score the length of each reply in tokens, 0 at most."""
        return [min(-(len(ids) - self.free) / self.cache, 0.0) for ids in response_token_ids]


__getattr__ = former_names(__name__)

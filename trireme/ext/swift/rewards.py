"""Rewards: those of ms-swift's reward functions that no other system has by these names."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from trireme.rewards.answers import boxed_or_all, graded
from trireme.rewards.orm import ORM
from trireme.rewards.reward import needs_truth

_SPECIAL = re.compile(r"<\|(?:endoftext|im_end)\|>")
_REACT = re.compile(r"<think>.*?</think>\s*Action:.*?Action Input:.*?", re.DOTALL)


class ReactFormat(ORM):
    """1 for <think>...</think>, then `Action:` and `Action Input:`."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        """Match the ReAct format of each reply."""
        return [float(_REACT.fullmatch(text) is not None) for text in completions]


@needs_truth
class MathORM(ORM):
    """1 where the boxed result of a completion is that of the solution, else 0; of a text without
    \\boxed{} all counts, of one with `# Answer` what follows it. None without a solution.
    """

    def __call__(
        self, completions: list[str], solution: Sequence[Any] = (), **kwargs: Any
    ) -> list[float | None]:
        """Compare results; None for a rollout without a solution."""
        truths = solution or [None] * len(completions)
        return [
            None if truth is None else float(graded(_result(text), _result(str(truth)))[0])
            for text, truth in zip(completions, truths, strict=True)
        ]


def _result(text: str) -> str:
    _, marked, rest = text.partition("# Answer")
    return boxed_or_all(rest.partition("# Answer")[0] if marked else text)[1]


@needs_truth
class ReactORM(ORM):
    """1 where a completion's last `Action:` and `Action Input:` are those of the solution, else 0.

    Inputs are compared as JSON where both are, else as texts. None without a solution.
    """

    def __call__(
        self, completions: list[str], solution: Sequence[Any] = (), **kwargs: Any
    ) -> list[float | None]:
        """Compare calls; None for a rollout without a solution."""
        truths = solution or [None] * len(completions)
        return [
            None if truth is None else float(_call_of(_said(text)) == _call_of(str(truth)))
            for text, truth in zip(completions, truths, strict=True)
        ]


def _said(completion: str) -> str:
    """Return a completion without its end tokens, and without an observation that it began to
    invent.
    """
    if completion.endswith("Observation:"):
        completion = completion.partition("Observation:")[0]
    return _SPECIAL.sub("", completion)


def _call_of(text: str) -> tuple[str, Any]:
    """Return the last action of a text in ReAct's form, and its input."""
    _, acts, action = text.rpartition("Action:")
    _, given, argument = text.rpartition("Action Input:")
    name = action.partition("Action Input:")[0].strip() if acts else "none"
    argument = argument.strip() if given else "{}"
    try:
        return name, json.loads(argument)
    except (ValueError, RecursionError):
        return name, (argument,)  # no JSON is equal to it

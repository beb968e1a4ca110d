"""Loss scale: which of the tokens that a dialogue sampled are trained, and how strongly.

A scale is a name, or a function `(reply) -> [(text, weight), ...]` that splits a reply; 0 leaves a
part out, other weights multiply the loss of its tokens. Text that was not sampled has no
log-probability and is never trained, whatever a scale says.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from trireme.model.recorder import Call
from trireme.model.turn import Decode, token_starts
from trireme.registry import Registry

Pieces = Sequence[tuple[str, float]]
Scale = Callable[[str], Pieces]


def weigh(path: Sequence[Call], name: str | Scale, decode: Decode) -> None:
    """Set the weights of all calls of a dialogue. Raises ValueError for pieces that do not add up.

    default, all: every turn. last_round: the last one only.
    """
    if name in ("default", "all"):
        return
    turns = [list(calls) for _, calls in itertools.groupby(path, key=_turn)]
    if name == "last_round":
        for call in itertools.chain.from_iterable(turns[:-1]):
            call.weights = [0.0] * len(call.completion.ids)
        return
    split = resolve(name)
    for calls in turns:
        reply = str((calls[-1].reply or {}).get("content") or "")
        borders, weights = _borders(reply, split, name)
        for call in calls:
            own = call.weights or [1.0] * len(call.completion.ids)
            starts = token_starts(call, decode)
            call.weights = [w * _at(s, borders, weights) for s, w in zip(starts, own, strict=True)]


def resolve(name: str | Scale) -> Scale:
    """The scale that a name, path or function is. Raises ValueError for an unknown one."""
    found: Any = SCALES.get(name) if isinstance(name, str) else name
    if isinstance(found, type):
        found = found()
    method = getattr(found, "get_loss_scale", None)
    if method is not None:  # ms-swift's class form: two lists
        return lambda reply: list(zip(*method(reply), strict=True))
    return found


def by_patterns(*patterns: tuple[str, float]) -> Scale:
    """A scale that weighs what matches a regular expression, and all else 1."""

    def split(reply: str) -> Pieces:
        pieces, at = [], 0
        spans = sorted(
            (m.start(), m.end(), weight)
            for pattern, weight in patterns
            for m in re.finditer(pattern, reply, re.DOTALL)
        )
        for start, end, weight in spans:
            if start >= at:
                pieces += [(reply[at:start], 1.0), (reply[start:end], weight)]
                at = end
        return [*pieces, (reply[at:], 1.0)]

    return split


def _borders(reply: str, split: Scale, name: Any) -> tuple[list[int], list[float]]:
    """Where each piece ends, and its weight."""
    pieces = split(reply)
    if "".join(text for text, _ in pieces) != reply:
        raise ValueError(
            f"loss_scale {name!r} gave pieces that do not add up to the reply {reply!r:.60}: "
            "expected the same text, in order"
        )
    ends = itertools.accumulate(len(text) for text, _ in pieces)
    return list(ends), [float(weight) for _, weight in pieces]


def _at(start: int, borders: list[int], weights: list[float]) -> float:
    """The weight of the piece in which a character lies; an end token's is 1."""
    return next((w for end, w in zip(borders, weights, strict=True) if start < end), 1.0)


def _turn(call: Call) -> int:
    return len(call.messages or ())


react = by_patterns(
    (r"Observation:.*?(?=Thought:|Action:|Final Answer:|$)", 0.0),
    (r"Action:.*?(?=Observation:|$)", 2.0),
)
hermes = by_patterns(
    (r"<tool_response>.*?</tool_response>", 0.0), (r"<tool_call>.*?</tool_call>", 2.0)
)
ignore_think = by_patterns((r"<think>.*?</think>\s*", 0.0))
ignore_empty_think = by_patterns((r"<think>\s*</think>\s*", 0.0))

_HERE = "trireme.workflows.loss_scale"
SCALES = Registry(
    "loss scale",
    {name: f"{_HERE}.{name}" for name in ("react", "hermes", "ignore_think", "ignore_empty_think")},
)

"""Loss scale: decides which sampled tokens of a dialogue are trained, and with which weight.

A scale is a name, several names joined by `+` (`last_round+hermes`: their weights multiply), or a
function `(reply) -> [(text, weight), ...]` that splits a reply, or a class of ms-swift's form; 0
leaves a part out, other weights multiply the loss of its tokens. Text that was not sampled has no
log-probability and is never trained, whatever the scale.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from trireme.config.options import accepted
from trireme.model.conversation import Decode, token_starts
from trireme.model.recorder import Call
from trireme.registry import SCALES, did_you_mean

Pieces = Sequence[tuple[str, float]]
Scale = Callable[[str], Pieces]
_Split = Callable[[str, bool], Pieces]
"""A scale function that also receives whether the reply is that of the last turn."""

LAST_ROUND = "last_round"
_TURNS = ("default", "all", LAST_ROUND)
"""Names that select the trained turns; all others split replies."""


class ContextType(str, Enum):  # noqa: UP042 (a plug-in may print it as ms-swift does)
    """The kind of a text that ms-swift's scales receive; here it is always a reply."""

    RESPONSE = "response"
    SUFFIX = "suffix"
    OTHER = "other"


class LossScale:
    """A scale in ms-swift's class form. Define `get_loss_scale`."""

    def get_loss_scale(self, context: str, *args: Any, **kwargs: Any) -> Any:
        """Return the texts of a reply, and the weight of each: two lists."""
        return [context], [1.0]


def weigh(path: Sequence[Call], name: str | Scale, decode: Decode) -> None:
    """Set the weights of all calls of a dialogue. Raises ValueError for pieces that do not add up.

    default, all: every turn. last_round: the last one only.
    """
    splits = resolve(name)
    turns = [list(calls) for _, calls in itertools.groupby(path, key=_turn)]
    for calls in turns:
        last = calls is turns[-1]
        if only_last(name) and not last:
            for call in calls:
                call.weights = [0.0] * len(call.completion.ids)
            continue
        reply = str((calls[-1].reply or {}).get("content") or "")
        for split in splits:
            borders, weights = _borders(reply, split(reply, last), name)
            for call in calls:
                call_weights = call.weights or [1.0] * len(call.completion.ids)
                starts = token_starts(call, decode)
                call.weights = [
                    w * _at(s, borders, weights) for s, w in zip(starts, call_weights, strict=True)
                ]


def only_last(name: Any) -> bool:
    """Return whether a scale trains only the last turn."""
    return isinstance(name, str) and LAST_ROUND in name.split("+")


def resolve(name: Any) -> list[_Split]:
    """Find the ways to split replies by a name, path, class or function. Raises ValueError for
    others.
    """
    if callable(name) or hasattr(name, "get_loss_scale"):
        return [_split_of(name)]
    known = [*_TURNS, *SCALES.names()]
    if not isinstance(name, str):
        raise ValueError(
            f"loss_scale is {name!r}: expected a function, or a name: {', '.join(known)}"
        )
    parts = name.split("+")
    turns = [part for part in parts if part in _TURNS]
    if len(turns) > 1:
        raise ValueError(f"loss_scale {name!r} has {' and '.join(turns)}: expected one of them")
    for part in parts:
        if part not in known and not {".", ":"} & set(part):
            hint = did_you_mean(part, known) or "."
            raise ValueError(
                f"loss_scale {name!r} has the unknown scale '{part}'{hint} Known: "
                f"{', '.join(known)}, and several joined by '+'"
            )
    return [_split_of(SCALES.get(part)) for part in parts if part not in _TURNS]


def _split_of(scale: Any) -> _Split:
    if isinstance(scale, type):
        scale = scale()
    method = getattr(scale, "get_loss_scale", None)
    if method is None:
        return lambda reply, last: scale(reply)

    def split(reply: str, last: bool) -> Pieces:
        context = {"context_type": ContextType.RESPONSE, "is_last_round": last, "query": None}
        return list(zip(*method(reply, **accepted(method, context)), strict=True))

    return split


def by_patterns(*patterns: tuple[str, float]) -> Scale:
    """Make a scale that weighs matches of regular expressions, and 1 for all else."""

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


def by_keywords(weights: Mapping[str, tuple[float, float]]) -> Scale:
    """Make a scale of replies in sections: each keyword has a weight, and the text after it up to
    the next keyword another; text before the first weighs 1.
    """
    border = re.compile("|".join(map(re.escape, weights)))

    def split(reply: str) -> Pieces:
        borders = list(border.finditer(reply))
        starts = [*(m.start() for m in borders), len(reply)]
        pieces = [(reply[: starts[0]], 1.0)]
        for match, end in zip(borders, starts[1:], strict=True):
            word, text = weights[match[0]]
            pieces += [(match[0], word), (reply[match.end() : end], text)]
        return pieces

    return split


def _borders(reply: str, pieces: Pieces, name: Any) -> tuple[list[int], list[float]]:
    if "".join(text for text, _ in pieces) != reply:
        raise ValueError(
            f"loss_scale {name!r} gave pieces that do not add up to the reply {reply!r:.60}: "
            "expected the same text, in order"
        )
    ends = itertools.accumulate(len(text) for text, _ in pieces)
    return list(ends), [float(weight) for _, weight in pieces]


def _at(start: int, borders: list[int], weights: list[float]) -> float:
    """Return the weight of a character's piece; an end token's is 1."""
    return next((w for end, w in zip(borders, weights, strict=True) if start < end), 1.0)


def _turn(call: Call) -> int:
    return len(call.messages or ())


react = by_keywords(
    {
        "Action:": (2.0, 2.0),
        "Action Input:": (2.0, 2.0),
        "Thought:": (1.0, 1.0),
        "Final Answer:": (1.0, 1.0),
        "Observation:": (2.0, 0.0),
    }
)
hermes = by_patterns(
    (r"<tool_response>.*?</tool_response>", 0.0), (r"<tool_call>.*?</tool_call>", 2.0)
)
ignore_think = by_patterns((r"<think>.*?</think>\s*", 0.0))
ignore_empty_think = by_patterns((r"<think>\s*</think>\s*", 0.0))

"""Edit: cuts a recorded reply back to a text, and replaces its end.

What remains of the reply keeps its sampled ids; what is added was not sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trireme.model.chat_tokens import ChatTokens
from trireme.model.conversation import cut, inserted, kept_tokens
from trireme.model.recorder import Call, Recorder


def cut_back(
    recorder: Recorder,
    chat: ChatTokens,
    messages: list[dict[str, Any]],
    content: str,
    tools: Sequence[Any] | None,
) -> tuple[Call, list[int]] | None:
    """Return the recorded reply to `messages` that begins like `content`, cut where they differ,
    and the ids of the rest; None if there is no such reply.
    """
    best: tuple[int, int, Call] | None = None
    for call in recorder.of_turn(messages, tools):
        kept = kept_tokens(call, content, chat.decode)
        if kept is not None and (best is None or kept[1] > best[0]):
            best = (kept[1], kept[0], call)
    if best is None:
        return None
    at, count, call = best
    return _first(call, count, chat), chat.encode(content[at:])


def replace_reply(
    recorder: Recorder,
    chat: ChatTokens,
    messages: list[dict[str, Any]],
    content: str,
    ids: Sequence[int] | None,
    weights: Sequence[float] | None,
    tools: Sequence[Any] | None,
) -> None:
    """Replace the last reply to `messages` by `content`; see Model.edit_reply."""
    [last, *_] = recorder.of_turn(messages, tools) or [None]
    if last is None:
        raise ValueError("edit_reply: no call of this rollout has replied to these messages")
    if ids is None:
        remaining = cut_back(recorder, chat, messages, content, tools)
        assert remaining is not None
        parent, rest = remaining
    else:
        sampled = last.completion.ids
        pairs = enumerate(zip(sampled, ids, strict=False))
        count = next((n for n, (a, b) in pairs if a != b), min(len(sampled), len(ids)))
        if weights is not None and any(weights[count:]):
            raise ValueError(
                f"edit_reply: token {count} of {len(ids)} was not sampled (or not with this "
                "id), and has a weight in the loss: expected 0"
            )
        parent, rest = _first(last, count, chat), list(ids[count:])
        if weights is not None:
            parent.weights = [float(weight) for weight in weights[:count]]
    newest = recorder.calls[-1].index
    recorder.add(inserted(parent, rest, content, index=newest))


def _first(call: Call, count: int, chat: ChatTokens) -> Call:
    """Return the call with its first `count` tokens; recorded when it is continued."""
    return call if count == len(call.completion.ids) else cut(call, count, chat.decode)

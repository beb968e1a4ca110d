"""Thinking: splits it from a reply for clients of the API, as `reasoning_parser` asks.

What was sampled stays as it is, and a conversation that goes on from it holds the recorded ids,
whether or not the client sends the thinking back. `Model.chat` gives whole replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trireme.model.recorder import Call

BEGIN, END = "<think>", "</think>"
ReasoningParser = Literal["deepseek_r1", "qwen3"]
_TAIL = 32
"""Tokens at a prompt's end that show whether the template has opened or closed the thinking."""


def record_thinking(
    call: Call, parser: ReasoningParser, decode: Callable[[Sequence[int]], str]
) -> None:
    """Keep a reply's message as clients see it: its thinking is `reasoning_content`."""
    if call.reply is None or not call.completion.ids:
        return
    text = call.reply["content"] if call.shown is None else call.shown
    prompt = decode(call.inserted[-_TAIL:]).rstrip()
    thinks = prompt.endswith(BEGIN) or (parser == "deepseek_r1" and not prompt.endswith(END))
    size = _length(text, thinks=thinks)
    if not size:
        return
    thinking = text[:size]
    call.thinking, call.shown = thinking, text[size:].lstrip("\n")
    thought = thinking.lstrip().removeprefix(BEGIN).removesuffix(END).strip("\n")
    call.reply = {**call.reply, "content": call.shown, "reasoning_content": thought}


def _length(text: str, *, thinks: bool) -> int:
    """How much of a reply is thinking, its end mark included. Without that mark it is all of a
    reply that has begun to think, in its prompt (`thinks`) or itself.
    """
    end = text.find(END)
    if end >= 0:
        return end + len(END)
    return len(text) if thinks or text.lstrip().startswith(BEGIN) else 0

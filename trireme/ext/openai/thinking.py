"""Thinking: splits a reply's thinking off for clients of the API, as `reasoning_parser` says.

Sampled tokens stay unchanged, and a conversation that continues from them uses the recorded ids,
whether or not the client sends the thinking back. `Model.chat` returns whole replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trireme.model.chat_tokens import ReasoningParser
    from trireme.model.recorder import Call

BEGIN, END = "<think>", "</think>"
_TAIL = 32
"""Tokens at a prompt's end that show whether the template has opened or closed the thinking."""


def record_thinking(
    call: Call, parser: ReasoningParser, decode: Callable[[Sequence[int]], str]
) -> None:
    """Store a reply's message as clients see it: its thinking is `reasoning_content`."""
    if call.reply is None or not call.completion.ids:
        return
    text = call.reply["content"] if call.shown is None else call.shown
    size = _length(text, thinks=begins_thinking(call.inserted, parser, decode))
    if not size:
        return
    thinking = text[:size]
    call.thinking, call.shown = thinking, text[size:].lstrip("\n")
    thought = thinking.lstrip().removeprefix(BEGIN).removesuffix(END).strip("\n")
    call.reply = {**call.reply, "content": call.shown, "reasoning_content": thought}


def thinking_length(text: str, *, thinks: bool = False) -> int:
    """Return how much of a reply is thinking, in which no tool calls are read: up to its end mark,
    or all of it without that mark. `thinks`: the prompt has begun it; otherwise the reply must.

    The first end mark counts: a later one may be part of a call's arguments.
    """
    if not thinks and not text.lstrip().startswith(BEGIN):
        return 0
    return _length(text, thinks=True)


def begins_thinking(
    prompt: Sequence[int],
    parser: ReasoningParser | None,
    decode: Callable[[Sequence[int]], str],
) -> bool:
    """Return True if a reply to these ids is thinking from its first token on."""
    text = decode(prompt[-_TAIL:]).rstrip()
    return text.endswith(BEGIN) or (parser == "deepseek_r1" and not text.endswith(END))


class StreamedThinking:
    """Splits one reply while it streams, as `record_thinking` splits the whole.

    If neither the prompt nor the reply has begun to think, a later `</think>` still makes the text
    before it thinking: nothing is sent before the reply's end.
    """

    def __init__(self, *, thinks: bool) -> None:
        """`thinks`: see `begins_thinking`."""
        self._thinks = thinks
        self._held = ""
        self._field = ""
        self.shown = {"reasoning_content": "", "content": ""}

    def add(self, piece: str) -> dict[str, str]:
        """Return the parts of thinking and answer that may be sent now; often empty."""
        self._held += piece
        if not self._field:
            text = self._held.lstrip()
            begun = text.startswith(BEGIN) or self._thinks
            if BEGIN.startswith(text) or not begun:
                return {}
            self._field, self._held = "reasoning_content", text.removeprefix(BEGIN)
        pieces = {}
        if self._field == "reasoning_content":
            self._strip()
            end = self._held.find(END)
            until = end if end >= 0 else len(self._held) - begun_marks(self._held, [END])
            thought = self._held[:until].rstrip("\n")
            pieces["reasoning_content"] = thought
            self._held = self._held[end + len(END) if end >= 0 else len(thought) :]
            self._field = "content" if end >= 0 else self._field
        if self._field == "content":
            self._strip()
            pieces["content"], self._held = self._held, ""
        for field, text in pieces.items():
            self.shown[field] += text
        return {field: text for field, text in pieces.items() if text}

    def rest(self, field: str, whole: str) -> str:
        """Return the part of a field's whole text that was not sent yet."""
        shown = self.shown[field]
        return whole[len(shown) :] if whole.startswith(shown) else ""

    def _strip(self) -> None:
        if not self.shown[self._field]:
            self._held = self._held.lstrip("\n")


def begun_marks(text: str, marks: Sequence[str]) -> int:
    """Count the characters at the end of a text that could begin a mark."""
    sizes = (n for mark in marks for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n]))
    return max(sizes, default=0)


def _length(text: str, *, thinks: bool) -> int:
    """Return how much of a reply is thinking, its end mark included. Without that mark, all of it
    if thinking was opened in the prompt (`thinks`) or in the reply.
    """
    end = text.find(END)
    if end >= 0:
        return end + len(END)
    return len(text) if thinks or text.lstrip().startswith(BEGIN) else 0

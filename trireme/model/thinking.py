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
    size = _length(text, thinks=begins_thinking(call.inserted, parser, decode))
    if not size:
        return
    thinking = text[:size]
    call.thinking, call.shown = thinking, text[size:].lstrip("\n")
    thought = thinking.lstrip().removeprefix(BEGIN).removesuffix(END).strip("\n")
    call.reply = {**call.reply, "content": call.shown, "reasoning_content": thought}


def begins_thinking(
    prompt: Sequence[int], parser: ReasoningParser, decode: Callable[[Sequence[int]], str]
) -> bool:
    """Whether a reply to these ids is thinking from its first token on."""
    text = decode(prompt[-_TAIL:]).rstrip()
    return text.endswith(BEGIN) or (parser == "deepseek_r1" and not text.endswith(END))


class StreamedThinking:
    """Splits one reply while its text comes, as `record_thinking` splits the whole.

    Where neither the prompt nor the reply has begun to think, a later `</think>` still makes what
    stands before it thinking: nothing is shown before the reply's end.
    """

    def __init__(self, *, thinks: bool) -> None:
        """`thinks`: see `begins_thinking`."""
        self._thinks = thinks
        self._held = ""
        self._field = ""
        self.shown = {"reasoning_content": "", "content": ""}

    def add(self, piece: str) -> dict[str, str]:
        """What of the thinking and of the answer may be shown now; often nothing."""
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
        """What of a field's whole text was not shown yet."""
        shown = self.shown[field]
        return whole[len(shown) :] if whole.startswith(shown) else ""

    def _strip(self) -> None:
        if not self.shown[self._field]:
            self._held = self._held.lstrip("\n")


def begun_marks(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text could be the beginning of a mark."""
    sizes = (n for mark in marks for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n]))
    return max(sizes, default=0)


def _length(text: str, *, thinks: bool) -> int:
    """How much of a reply is thinking, its end mark included. Without that mark it is all of a
    reply that has begun to think, in its prompt (`thinks`) or itself.
    """
    end = text.find(END)
    if end >= 0:
        return end + len(END)
    return len(text) if thinks or text.lstrip().startswith(BEGIN) else 0

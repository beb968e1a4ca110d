"""Recorder: records a rollout's calls to the model, and which call continues which.

Calls form trees. A call's parent is the one whose ids (prompt and reply) its prompt begins with, so
that a path from a root down is one conversation, with exactly the sampled tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from trireme.engines.engine import Completion
from trireme.model.chat_tokens import Message, Recorded
from trireme.pictures import Picture, album, shown


@dataclass(eq=False)
class Call:
    """One sampled reply. Of its prompt it stores only the part that its parent lacks."""

    parent: Call | None
    inserted: list[int]
    """Prompt ids after the parent's last one; the whole prompt of a root."""
    completion: Completion
    temperature: float
    index: int = 0
    """The number of the request; its n samples share it."""
    messages: list[dict[str, Any]] | None = None
    """The conversation before the reply; None if the prompt was not made from messages."""
    reply: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tools_dropped: bool = False
    """Whether the chat template left out the tools."""
    prompt_text: str | None = None
    pictures: tuple[Picture, ...] = ()
    """The pictures of the conversation before the reply."""
    truncated: bool = False
    """Whether its prompt was too long, so that nothing was sampled."""
    shown: str | None = None
    """The reply as clients see it without its tool calls and thinking; None: all of its text."""
    thinking: str | None = None
    """The sampled thinking at its start, if clients see it separately."""
    weights: list[float] | None = None
    """Loss weight of each sampled token, 0: not trained; None: all 1."""
    extended: bool = False
    """Whether a later call continues it."""
    origin: Call | None = None
    """The call that this one is a prefix of."""

    @property
    def path(self) -> list[Call]:
        """Return the conversation up to here, from its first call."""
        calls: list[Call] = [self]
        while (parent := calls[-1].parent) is not None:
            calls.append(parent)
        return calls[::-1]

    @property
    def ids(self) -> list[int]:
        """Return the ids of prompt and reply."""
        ids: list[int] = []
        for call in self.path:
            ids += call.inserted
            ids += call.completion.ids
        return ids

    @property
    def prompt_tokens(self) -> int:
        """Return the number of ids that it was sampled from."""
        sizes = (len(call.inserted) + len(call.completion.ids) for call in self.path)
        return sum(sizes) - len(self.completion.ids)

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Return all messages, including the reply."""
        return [*(self.messages or []), *([self.reply] if self.reply else [])]

    def recorded(self) -> Recorded:
        """Return the part of the record that a continuing prompt needs."""
        c = self.completion
        ended = c.stop_reason == "stop" and not isinstance(c.stop, str)
        messages = self.conversation
        if self.thinking and self.reply:  # a template may treat a reply with thinking differently
            whole = {**self.reply, "content": self.thinking + self.reply["content"]}
            messages = [*messages[:-1], whole]
        return Recorded(messages, c.ids or self.inserted, ended=ended)

    def without_known_routing(self) -> Completion:
        """Return the completion without the experts of tokens whose experts an earlier call of the
        conversation has.
        """
        c = self.completion
        count = len(self.inserted) + len(c.ids)
        for call in self.path[-2::-1]:
            if call.completion.routed_experts is not None:
                assert c.routed_experts is not None
                return replace(c, routed_experts=c.routed_experts[-count:].copy())
            count += len(call.inserted) + len(call.completion.ids)
        return c


class Recorder:
    """All calls of one rollout, in the order in which they were made."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.splits = 0
        """Conversations that continued as new ones, because the template rewrote their history."""
        self._children: dict[Call | None, list[Call]] = {None: []}
        self._taken: set[Call] = set()
        self._dropped: set[Call] = set()

    def add(self, call: Call) -> None:
        """Record a reply, and its parent if that is a cut call."""
        if call.parent is not None and call.parent not in self._children:
            self.add(call.parent)
        if call.completion.routed_experts is not None:
            call.completion = call.without_known_routing()
        self.calls.append(call)
        self.calls.sort(key=lambda c: c.index)  # replies may arrive out of order
        self._children[call.parent].append(call)
        self._children[call] = []
        if call.parent is not None:
            call.parent.extended = True

    def pictures_of(self, ids: Sequence[int]) -> tuple[Picture, ...]:
        """Return the pictures of earlier calls that these ids show."""
        known = album(picture for call in self.calls for picture in call.pictures)
        return tuple(shown(ids, known).values()) if known else ()

    def fresh(self) -> list[Call]:
        """Return the calls that no `take` has returned yet."""
        return [call for call in self.calls if call not in self._taken]

    def take(self) -> list[Call]:
        """Return the `fresh` calls and mark them as taken. Later calls still continue them."""
        calls = self.fresh()
        self._taken.update(calls)
        return calls

    def by_messages(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Call | None:
        """Return the call with the longest conversation that `messages` begins with."""
        best, length = None, 0
        for call in reversed(self.calls):
            if call.messages is None or call.truncated or (call.tools or None) != (tools or None):
                continue
            size = len(call.messages)
            if not length < size + 1 <= len(messages) or not _same(messages[size], call.reply):
                continue
            if all(map(_same, messages, call.messages)):
                best, length = call, size + 1
        return best

    def of_turn(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Call]:
        """Return the calls whose reply, or a part of it, directly follows these messages; latest
        first.
        """
        return [
            call
            for call in reversed(self.calls)
            if call.messages is not None
            and not call.truncated
            and (call.tools or None) == (tools or None)
            and len(call.messages) == len(messages)
            and all(map(_same, messages, call.messages))
        ]

    def by_ids(self, prompt: Sequence[int]) -> tuple[Call | None, int]:
        """Return the call with the most ids that `prompt` begins with, and their number."""
        best: Call | None = None
        at = 0
        pending: list[tuple[Call, int]] = [(call, 0) for call in self._children[None]]
        while pending:
            call, start = pending.pop()
            sequence = [*call.inserted, *call.completion.ids]
            if call.truncated or list(prompt[start : start + len(sequence)]) != sequence:
                continue
            end = start + len(sequence)
            if end > at:
                best, at = call, end
            pending += [(child, end) for child in self._children[call]]
        return best, at

    def orphans(self) -> set[Call]:
        """Return the calls that were repeated and that nothing continues, while something continues
        another.

        Such a reply was lost or abandoned: later calls do not follow from it.
        """
        return self._dropped | {
            call
            for siblings in self._children.values()
            for call in siblings
            if not call.extended and any(_retries(call, other) for other in siblings)
        }

    def drop_branches(self) -> None:
        """Mark abandoned replies of a conversation without branches: calls of a turn that its last
        call does not come from were cut away, and become orphans.
        """
        for call in self.calls:
            if call.messages is not None and not call.truncated:
                last = self.of_turn(call.messages, call.tools)[0]
                if call not in last.path:
                    self._dropped.add(call)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)


def _retries(call: Call, other: Call) -> bool:
    return other is not call and other.extended and other.inserted == call.inserted


def _same(message: Message, recorded: Message | None) -> bool:
    """Return True if two messages have the same content; white space around a reply, a client's
    speaker names and omitted thinking do not count.
    """
    if recorded is None or message["role"] != recorded["role"]:
        return False
    if message == recorded:
        return True
    if message["role"] != "assistant":
        return False
    one, two = ({k: v for k, v in m.items() if k != "name"} for m in (message, recorded))
    if not one.get("reasoning_content"):
        one.pop("reasoning_content", None)
        two.pop("reasoning_content", None)
    texts = (one.pop("content", None) or "", two.pop("content", None) or "")
    calls = (_plain_calls(one.pop("tool_calls", None)), _plain_calls(two.pop("tool_calls", None)))
    return (
        one == two
        and calls[0] == calls[1]
        and isinstance(texts[0], str)
        and texts[0].strip() == str(texts[1]).strip()
    )


def _plain_calls(calls: Any) -> list[Any]:
    """Return name and arguments of tool calls, however a client reformats their JSON."""
    out = []
    for call in calls or ():
        function = call.get("function", {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments)
        out.append((call.get("id"), function.get("name"), arguments))
    return out

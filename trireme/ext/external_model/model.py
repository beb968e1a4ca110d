"""ApiModel: the Model of an API's rollouts, which translates tool calls between API and text.

An API returns calls separately from text. An ApiEngine writes them into the text in hermes form, so
that workflows and clients read them as for any other model; here they are split off again for the
API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from trireme.ext.external_model.engine import ASKED, Asked
from trireme.ext.openai.thinking import thinking_length
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model, Reply
from trireme.model.tool_calls import Read, format_of, hermes, message_of
from trireme.text import all_joined

_BEGIN = cast(Callable[[str], str], format_of("hermes").begin)


class ApiModel(Model):
    """A Model whose conversations reach an API as messages."""

    @classmethod
    def attune(cls, chat: ChatTokens) -> None:
        """Implement Model.attune."""
        read_api_calls(chat)

    async def chat_samples(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        begin: str = "",
        **options: Any,
    ) -> list[Reply]:
        """Implement Model.chat_samples. An API's answer is recorded whole, and `begin` only becomes
        part of the request: not every API obeys it.
        """
        choice: Any = None
        if begin:
            name = begin.removeprefix(_BEGIN("")).partition('"')[0]
            choice = {"type": "function", "function": {"name": name}} if name else "required"
        asked = ASKED.set(Asked(all_joined(_with_calls_apart(messages)), all_joined(tools), choice))
        try:
            return await super().chat_samples(messages, tools, **options)
        finally:
            ASKED.reset(asked)


def read_api_calls(chat: ChatTokens) -> None:
    """Make `chat` also read the calls that an ApiEngine writes, and always use the received text:
    the ids are not the API's own, and none of them ends a reply. A forced call begins in hermes
    form, whatever form the template uses.
    """
    form = chat.tool_format

    def read(text: str, tools: Sequence[Any]) -> Read:
        said, calls = hermes(text, tools)
        return (said, calls) if calls and not calls[0].error else form.read(text, tools)

    reads = hermes if form.read is hermes else read
    chat.tool_format = form._replace(read=reads, begin=_BEGIN, openings=("",))
    chat.misreads_calls = False


def _with_calls_apart(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert messages to the API's form: calls in a reply's text move to its `tool_calls`, and the
    results after it get the ids of those calls, in order.
    """
    out: list[dict[str, Any]] = []
    ids: list[str] = []
    for message in messages:
        sent = dict(message)
        if sent.get("role") == "assistant":
            content = sent.get("content")
            text = content if isinstance(content, str) else ""
            size = thinking_length(text)
            said, calls = hermes(text[size:], ())
            made = [message_of(call) for call in calls if not call.error]
            if calls and len(made) == len(calls):
                sent |= {"content": text[:size] + said or None, "tool_calls": made}
            ids = [call["id"] for call in made]
        elif sent.get("role") == "tool" and ids:
            sent["tool_call_id"] = ids.pop(0)
        out.append(sent)
    return out

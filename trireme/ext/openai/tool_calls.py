"""Tool calls: records a reply's calls apart from its text, as clients of the API send them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trireme.ext.openai.thinking import BEGIN, END, begins_thinking, thinking_length
from trireme.model.tool_calls import Read, ToolFormat, message_of

if TYPE_CHECKING:
    from trireme.model.chat_tokens import ReasoningParser
    from trireme.model.recorder import Call


def record_tool_calls(
    call: Call,
    form: ToolFormat,
    decode: Callable[[Sequence[int]], str],
    begun: str = "",
    *,
    wanted: bool = True,
    one: bool = False,
    parser: ReasoningParser | None = None,
) -> None:
    """Store a reply's message as the client will send it back, with its calls separate.

    `begun` is the start of the reply that the model was given. The reply stays text, including that
    start, if any call cannot be read, or if calls are not `wanted`. `one`: of several calls only
    the first is stored; the sampled tokens remain as they are. `parser`: see `read_reply`.
    """
    if call.reply is None:
        return
    if call.reply["content"] != begun + call.completion.text:
        begun = ""  # an API writes the whole reply; the start was only a request
    before = call.reply["content"].removesuffix(call.completion.text).removesuffix(begun)
    whole = begun + sampled_text(call, form, decode)
    content, calls = read_reply(call, whole, form, decode, parser, before + begun)
    if any(c.error or not isinstance(c.arguments, dict) or not wanted for c in calls):
        call.shown = begun + call.completion.text if begun else None
        return
    if calls or (form.always and content != whole):
        call.shown = content
        stored = calls[:1] if one else calls
        made = {"tool_calls": [message_of(c) for c in stored]} if stored else {}
        call.reply = {**call.reply, "content": before + content, **made}


def read_reply(
    call: Call,
    text: str,
    form: ToolFormat,
    decode: Callable[[Sequence[int]], str],
    parser: ReasoningParser | None = None,
    given: str = "",
) -> Read:
    """Read the calls in a reply's `text`, but for those that its thinking mentions. The thinking
    stays in front of the content. `parser`: whether the model may think without a mark of the
    prompt; `given`: text of the request that the reply continues.
    """
    size = 0
    if not form.always:  # such a form has marks of its own for thinking
        thinks = begins_thinking(call.inserted, parser, decode)
        if given:
            thinks = BEGIN in given and END not in given.rpartition(BEGIN)[2]
        size = thinking_length(text, thinks=thinks)
    content, calls = form.read(text[size:], call.tools or ())
    return text[:size] + content, calls


def sampled_text(call: Call, form: ToolFormat, decode: Callable[[Sequence[int]], str]) -> str:
    """Return the sampled text without its end token, with special tokens if those are marks."""
    c, ids = call.completion, call.completion.ids
    if any(opening in c.text for opening in form.openings):
        return c.text
    if c.stop_reason == "stop" and not isinstance(c.stop, str):
        ids = ids[:-1]
    text = decode(ids)
    cut = text.rfind(c.stop) if isinstance(c.stop, str) else -1
    return text if cut < 0 else text[:cut]

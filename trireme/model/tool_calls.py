"""Tool calls: reads them out of a model's reply, by the format of its family or of its template.

Invariants:
- What a family's template renders of a call, its format reads. Text is read with its special
  tokens, which are the marks of some formats.
- Reading takes time in proportion to the text, whatever a model has written.
- A call that was cut has one error, `CUT`, in every format. A reply with a call that cannot be read
  stays text for HTTP clients; a scheduler tells the model why.
- Your own is a function `(text, tools) -> (content, [ToolCall, ...])`, named by its path.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from trireme.extensions import former_names
from trireme.registry import FORMATS
from trireme.task import NO_JSON, object_or_text
from trireme.text import all_joined, as_json, joined

if TYPE_CHECKING:
    from trireme.model.recorder import Call

OPENING, CLOSING = "<tool_call>", "</tool_call>"
CUT = "the call was cut before its end"
CALL = re.compile(rf"{OPENING}(.*?)({CLOSING}|\Z)", re.DOTALL)
_call_ids = itertools.count()


@dataclass(frozen=True)
class ToolCall:
    """One call that a reply asks for."""

    name: str
    arguments: Any
    """By name; text is for the first argument."""
    id: str | None = None
    error: str | None = None
    """Why it cannot be read."""

    def __post_init__(self) -> None:
        """A model may write half a surrogate pair, which no server, program or template takes."""
        object.__setattr__(self, "name", joined(self.name))
        object.__setattr__(self, "arguments", all_joined(self.arguments))


Read = tuple[str, list[ToolCall]]
"""What a reply says beside its calls, and these."""
Reader = Callable[[str, Sequence[Any]], Read]


class ToolFormat(NamedTuple):
    """How a family writes calls."""

    read: Reader
    marks: tuple[str, ...] = ()
    """A template that holds one of them is the family's."""
    begin: Callable[[str], str] | None = None
    """What a reply begins with that has to call a tool, of this name or of one yet to be named."""
    openings: tuple[str, ...] = ()
    """What calls begin with in the text that is shown: a stream goes so far. Without any it waits
    for the reply's end."""
    always: bool = False
    """Its replies are not plain text without calls either."""


def tool_format(**options: Any) -> Callable[[Reader], Reader]:
    """Decorate a reader with what else its format has: the other fields of ToolFormat."""

    def mark(read: Reader) -> Reader:
        setattr(read, _FORM, ToolFormat(read, **options))
        return read

    return mark


_FORM = "tool_format"


def format_of(name: str | None, template: str = "") -> ToolFormat:
    """By name or path; else that of the template, which is hermes where it has no other's mark.

    Raises ValueError for an unknown name.
    """
    if name is None:
        # a template of another family may hold the mark of hermes too
        known = (format_of(one) for one in FORMATS.built_in() if one != "hermes")
        marked = (f for f in known if any(mark in template for mark in f.marks))
        return next(marked, format_of("hermes"))
    named: Any = FORMATS.get(name)
    if not inspect.isroutine(named):
        raise ValueError(f"tool_call_parser '{name}' is {named!r:.40}: expected a function")
    return getattr(named, _FORM, None) or ToolFormat(named)


@tool_format(
    marks=(OPENING,),
    begin=lambda name: f'{OPENING}\n{{"name": "{name}' + ('", "arguments": ' if name else ""),
    openings=(OPENING,),
)
def hermes(text: str, tools: Sequence[Any]) -> Read:
    """`<tool_call>{"name", "arguments"}</tool_call>`, of Hermes, Qwen2.5 and Qwen3."""
    return text.partition(OPENING)[0], read_tool_calls(text)[0]


def read_tool_calls(text: str) -> tuple[list[ToolCall], int]:
    """The calls in a reply of the format hermes, and where the last one ends.

    A call needs no closing tag at the end of the text: a stop string or a limit may have cut it.
    What follows a `<tool_response>`, as if the model had seen a result, is not read.
    """
    matches = list(CALL.finditer(text.partition("<tool_response>")[0]))
    calls = [call_of_json(match[1].strip()) for match in matches]
    if calls and calls[-1].error and not matches[-1][2]:
        calls[-1] = replace(calls[-1], error=CUT)
    return calls, matches[-1].end() if matches else 0


def call_of_json(text: str) -> ToolCall:
    """The call `{"name", "arguments"}`; with an `error` where the text is none."""
    try:
        call = json.loads(text)
    except NO_JSON as error:
        return ToolCall("", {}, error=f"the call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, error="the call must be a JSON object with `name` and `arguments`")
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = object_or_text(arguments)
    return ToolCall(call["name"], arguments)


def message_of(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form."""
    function = {"name": call.name, "arguments": as_json(call.arguments)}
    return {"id": f"call_{next(_call_ids)}", "type": "function", "function": function}


def record_tool_calls(
    call: Call,
    form: ToolFormat,
    decode: Callable[[Sequence[int]], str],
    begun: str = "",
    *,
    wanted: bool = True,
) -> None:
    """Keep a reply's message as the client will send it back: with its calls apart.

    `begun` is what the reply was begun with for the model. All of it stays text, its beginning too,
    where one call cannot be read, and where calls are not `wanted`.
    """
    if call.reply is None:
        return
    if call.reply["content"] != begun + call.completion.text:
        begun = ""  # the whole reply is an API's, which is only asked to begin like this
    whole = begun + sampled_text(call, form, decode)
    content, calls = form.read(whole, call.tools or ())
    if any(c.error or not isinstance(c.arguments, dict) or not wanted for c in calls):
        call.shown = begun + call.completion.text if begun else None
        return
    if calls or (form.always and content != whole):
        call.shown = content
        before = call.reply["content"].removesuffix(call.completion.text).removesuffix(begun)
        made = {"tool_calls": [message_of(c) for c in calls]} if calls else {}
        call.reply = {**call.reply, "content": before + content, **made}


def sampled_text(call: Call, form: ToolFormat, decode: Callable[[Sequence[int]], str]) -> str:
    """What was sampled, but for what ended it, with special tokens where those are marks."""
    c, ids = call.completion, call.completion.ids
    if any(opening in c.text for opening in form.openings):
        return c.text
    if c.stop_reason == "stop" and not isinstance(c.stop, str):
        ids = ids[:-1]
    text = decode(ids)
    cut = text.rfind(c.stop) if isinstance(c.stop, str) else -1
    return text if cut < 0 else text[:cut]


__getattr__ = former_names(__name__)

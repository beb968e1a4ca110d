"""Tool calls: reads them out of a model's reply, by the format of its family or of its template.

Invariants:
- Each format reads what the family's template renders. Text is read with its special tokens, which
  are the marks of some formats.
- Reading takes time in proportion to the text, whatever the model wrote; a form that a checkpoint
  describes has a limit of time instead.
- A call that was cut has one error, `CUT`, in every format. A reply with a call that cannot be read
  stays text for HTTP clients; a scheduler sends the model the reason.
- A custom format is a function `(text, tools) -> (content, [ToolCall, ...])`, named by its path.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trireme.extensions import former_names
from trireme.registry import FORMATS
from trireme.task import NO_JSON, object_or_text
from trireme.text import all_joined, as_json, joined

OPENING, CLOSING = "<tool_call>", "</tool_call>"
CUT = "the call was cut before its end"
CALL = re.compile(rf"{OPENING}(.*?)({CLOSING}|\Z)", re.DOTALL)
_call_ids = itertools.count()


@dataclass(frozen=True)
class ToolCall:
    """A call that a reply requests."""

    name: str
    arguments: Any
    """The arguments by name; plain text is for the first argument."""
    id: str | None = None
    error: str | None = None
    """The reason why the call cannot be read."""

    def __post_init__(self) -> None:
        """Replace half surrogate pairs, which a model may write and no server, program or template
        accepts.
        """
        object.__setattr__(self, "name", joined(self.name))
        object.__setattr__(self, "arguments", all_joined(self.arguments))


Read = tuple[str, list[ToolCall]]
"""The text of a reply without its calls, and the calls."""
Reader = Callable[[str, Sequence[Any]], Read]


class ToolFormat(NamedTuple):
    """The form in which a model family writes calls."""

    read: Reader
    marks: tuple[str, ...] = ()
    """A template that contains one of them is the family's."""
    begin: Callable[[str], str] | None = None
    """Returns the start of a reply that must call a tool: this one, or one not yet named."""
    openings: tuple[str, ...] = ()
    """The openings of calls in visible text: a stream stops there. Without any it waits for the
    reply's end."""
    always: bool = False
    """Whether its replies are not plain text even without calls."""
    described: Callable[[Any], Reader] | None = None
    """Makes the reader, if the form is one that each checkpoint describes, of its tokenizer. Raises
    ValueError for one that describes none."""


def tool_format(**options: Any) -> Callable[[Reader], Reader]:
    """Register a reader as a format, with the other fields of ToolFormat."""

    def mark(read: Reader) -> Reader:
        setattr(read, _FORM, ToolFormat(read, **options))
        return read

    return mark


_FORM = "tool_format"


def format_of(name: str | None, template: str = "", tokenizer: Any = None) -> ToolFormat:
    """Find a format by name or path; otherwise by the template's marks, with hermes as the default.

    Raises ValueError for an unknown name, and for a format that the checkpoint of this `tokenizer`
    should describe and does not.
    """
    if name is None:
        # a template of another family may contain the mark of hermes too
        known = (format_of(one) for one in FORMATS.built_in() if one != "hermes")
        marked = (f for f in known if any(mark in template for mark in f.marks))
        return next(marked, format_of("hermes"))
    named: Any = FORMATS.get(name)
    if not inspect.isroutine(named):
        raise ValueError(f"tool_call_parser '{name}' is {named!r:.40}: expected a function")
    form: ToolFormat = getattr(named, _FORM, None) or ToolFormat(named)
    if form.described is None or tokenizer is None:
        return form
    return form._replace(read=form.described(tokenizer))


def described_format(tokenizer: Any) -> ToolFormat | None:
    """Return the format that a checkpoint describes itself; None if it describes none."""
    for name in FORMATS.built_in():
        if format_of(name).described is not None:
            with suppress(ValueError):
                return format_of(name, tokenizer=tokenizer)
    return None


@tool_format(
    marks=(OPENING,),
    begin=lambda name: f'{OPENING}\n{{"name": "{name}' + ('", "arguments": ' if name else ""),
    openings=(OPENING,),
)
def hermes(text: str, tools: Sequence[Any]) -> Read:
    """Read `<tool_call>{"name", "arguments"}</tool_call>`, the format of Hermes, Qwen2.5
    and Qwen3.
    """
    return text.partition(OPENING)[0], read_tool_calls(text)[0]


def read_tool_calls(text: str) -> tuple[list[ToolCall], int]:
    """Return the calls in a reply of the format hermes, and the end of the last one.

    A call needs no closing tag at the end of the text: a stop string or a limit may have cut it.
    Text after a `<tool_response>`, a made-up result, is not read.
    """
    matches = list(CALL.finditer(text.partition("<tool_response>")[0]))
    calls = [call_of_json(match[1].strip()) for match in matches]
    if calls and calls[-1].error and not matches[-1][2]:
        calls[-1] = replace(calls[-1], error=CUT)
    return calls, matches[-1].end() if matches else 0


def call_of_json(text: str) -> ToolCall:
    """Parse the call `{"name", "arguments"}`; with an `error` if the text is not one."""
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
    """Return a call in OpenAI's form."""
    function = {"name": call.name, "arguments": as_json(call.arguments)}
    return {"id": f"call_{next(_call_ids)}", "type": "function", "function": function}


__getattr__ = former_names(__name__)

"""Tool calls: `<tool_call>{json}</tool_call>` in a reply, as the structure that clients expect."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trireme.model.recorder import Call

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPENING}\s*(.*?)\s*(?:{CLOSING}|\Z)", re.DOTALL)
_ids = itertools.count()


@dataclass(frozen=True)
class ToolCall:
    """One call that a reply asks for."""

    name: str
    arguments: Any
    """By name; text is for the first argument."""
    id: str | None = None
    error: str | None = None
    """Why it cannot be read."""


def read_tool_calls(text: str) -> tuple[list[ToolCall], int]:
    """The calls in a reply, and where the last one ends.

    A call needs no closing tag at the end of the text: a stop string or a limit may have cut it.
    What follows a `<tool_response>`, as if the model had seen a result, is not read.
    """
    matches = list(_CALL.finditer(text.partition("<tool_response>")[0]))
    return [call_of_json(match[1]) for match in matches], matches[-1].end() if matches else 0


def call_of_json(text: str) -> ToolCall:
    """The call `{"name", "arguments"}`; with an `error` where the text is none."""
    try:
        given = json.loads(text)
    except ValueError as error:
        return ToolCall("", {}, error=f"the call is no JSON: {error}")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return ToolCall("", {}, error="the call must be a JSON object with `name` and `arguments`")
    arguments = given.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = object_or_text(arguments)
    return ToolCall(given["name"], arguments)


def object_or_text(text: str) -> Any:
    """A JSON object, else the text as it is."""
    try:
        given = json.loads(text)
    except ValueError:
        return text
    return given if isinstance(given, dict) else text


def parse_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text before the first call, and the calls; all of it and none where one is not right."""
    calls, _ = read_tool_calls(text)
    if not calls or any(call.error or not isinstance(call.arguments, dict) for call in calls):
        return text, []
    return text.partition(OPENING)[0], [_message_of(call) for call in calls]


def _message_of(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{next(_ids)}", "type": "function", "function": function}


def record_tool_calls(call: Call) -> None:
    """Keep a reply's message as the client will send it back: with its calls apart."""
    text = call.completion.text
    before, calls = parse_tool_calls(text)
    if calls and call.reply is not None:
        content = call.reply["content"].removesuffix(text) + before
        call.reply = {**call.reply, "content": content, "tool_calls": calls}


def wants_tool_calls(body: Mapping[str, Any]) -> bool:
    """Whether a chat request has tools that may be called."""
    return bool(body.get("tools")) and body.get("tool_choice") != "none"

"""Tool calls: `<tool_call>{json}</tool_call>` in a reply, as the structure that clients expect."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from trireme.model.recorder import Call

OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_ids = itertools.count()


def parse_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text before the first call, and the calls; all of it and none where one is not right."""
    calls = []
    for part in _CALL.findall(text):
        try:
            given = json.loads(part)
        except ValueError:
            return text, []
        arguments = given.get("arguments", {})
        if not isinstance(given.get("name"), str) or not isinstance(arguments, dict):
            return text, []
        function = {"name": given["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"call_{next(_ids)}", "type": "function", "function": function})
    return (text.partition(OPENING)[0], calls) if calls else (text, [])


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

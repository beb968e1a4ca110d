"""Response template: reads tool calls by the template that a checkpoint ships for its own replies.

Transformers' parser finds where the calls are and makes their values. Ours remains what it leaves
out:
- A damaged call is an error of its own, not of the whole reply, and one that was cut is `CUT`.
- The patterns are the checkpoint's: some take time that grows with the square or the cube of a
  reply, so that reading ends after `SECONDS`.
- Thinking stays in the content, where `reasoning_parser` looks for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trireme.ext.chat_formats.formats import typed_by_schema
from trireme.model.tool_calls import CUT, Read, Reader, ToolCall, call_of_json, tool_format

SECONDS = 1.0
"""The time that reading a reply may take."""
_NAME = "tool_call_parser 'response_template'"
_CALLS, _CONTENT, _BODY = "tool_calls", "content", "content"
_THOUGHT = "</think>"
_END = "\0"
"""Ends the text, so that a call whose end the template did not find is known by it."""


def reader_of(tokenizer: Any) -> Reader:
    """Return the reader for a checkpoint. Raises ValueError if its tokenizer has no response
    template, or one that transformers refuses.
    """
    spec = getattr(tokenizer, "response_template", None)
    if spec is None:
        raise ValueError(f"{_NAME}: the model's tokenizer has no response template")
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        template = load_response_template(spec)
    except Exception as error:  # the template is the checkpoint's
        raise ValueError(f"{_NAME}: the model's template is refused: {error}") from error

    def read(text: str, tools: Sequence[Any]) -> Read:
        return _read(template, text, tools)

    return read


@tool_format(described=reader_of)
def response_template(text: str, tools: Sequence[Any]) -> Read:
    """Read no calls: where they are is known by a checkpoint's template alone."""
    return text, []


def _read(template: Any, text: str, tools: Sequence[Any]) -> Read:
    from transformers.utils.chat_parsing import ResponseParser

    left = _Left(SECONDS)
    fields = {name: _plain(field, left) for name, field in template.fields.items()}
    thinks = any(f.close_re and f.close_re.match(_THOUGHT) for f in template.fields.values())
    size = text.find(_THOUGHT) + len(_THOUGHT) if thinks and _THOUGHT in text else 0
    try:
        parser = ResponseParser(replace(template, fields=fields, defaults={}), prefix="")
        events = parser.feed(text[size:].rstrip(_END) + _END)
        events += parser.finalize()[1]
    except Exception as error:  # the patterns are the checkpoint's
        return text, [ToolCall("", {}, error=_reason(error))]
    said, calls = text[:size], list[ToolCall]()
    for event in events:
        if event["type"] == "region_close" and event["field"] == _CALLS:
            calls += _calls(template.fields[_CALLS], event["value"], tools, left)
        elif event["type"] == "region_close" and event["field"] == _CONTENT and not calls:
            said += event["value"].removesuffix(_END)
    return (said, calls) if calls else (text, [])


def _plain(field: Any, left: _Left) -> Any:
    """Make a field's values its text, with the names in its patterns beside it for calls."""
    names = [] if field.open_re is None else field.open_re.groupindex
    captured = {name: f"{{{name}}}" for name in names} | {_BODY: "{content}"}
    return replace(
        field,
        open_re=None if field.open_re is None else _Timed(field.open_re, left),
        close_re=None if field.close_re is None else _Timed(field.close_re, left),
        content="text",
        content_args={"strip": False},
        repeats=True,
        join=None,
        optional=True,
        transform=captured if field.name == _CALLS else None,
        transform_each=False,
    )


def _calls(field: Any, value: dict[str, Any], tools: Sequence[Any], left: _Left) -> list[ToolCall]:
    """Make the calls in a region, of its text and of what its opening names."""
    import regex
    from transformers.utils.chat_parsing.content_parsers import process_field

    captured, body = dict(value), value[_BODY]
    del captured[_BODY]
    closes = field.close_re is not None and field.close_re.fullmatch("") is None
    cut = closes and body.endswith(_END)
    body = body.removesuffix(_END)
    if cut and field.content != "json":  # nothing but its own end closes JSON
        return [ToolCall("", {}, error=CUT)]
    try:
        if tag := field.content_args.get("tag_pattern"):  # transformers' search has no time limit
            for _ in regex.finditer(tag, body, flags=regex.DOTALL, timeout=left()):
                pass
        made = process_field(body, field, captured)
    except Exception as error:  # the template is the checkpoint's
        return [ToolCall("", {}, error=CUT if cut else _reason(error))]
    found = []
    for one in made if isinstance(made, list) else [made]:
        function = one.get("function", one) if isinstance(one, dict) else one
        call = call_of_json(json.dumps(function))
        if isinstance(call.arguments, dict):
            call = replace(call, arguments=typed_by_schema(call.name, call.arguments, tools))
        found.append(call)
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the checkpoint's response template takes too long to read the reply"
    return f"the call cannot be read: {' '.join(str(error).split()):.200}"


class _Left:
    """The seconds until a deadline."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def __call__(self) -> float:
        """Return the seconds that are left. Raises TimeoutError if there are none."""
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        return left


class _Timed:
    """A pattern whose searches and matches end at a deadline."""

    def __init__(self, pattern: Any, left: Callable[[], float]) -> None:
        self._pattern, self._left = pattern, left

    def search(self, text: str, start: int, **options: Any) -> Any:
        """Search as the pattern does. Raises TimeoutError at the deadline."""
        return self._pattern.search(text, start, timeout=self._left(), **options)

    def match(self, text: str, start: int) -> Any:
        """Match at `start` as the pattern does. Raises TimeoutError at the deadline."""
        return self._pattern.match(text, start, timeout=self._left())

"""Responses: OpenAI's `/v1/responses` in the terms of a chat completion, and back."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from trireme.ext.http.messages import joined_parts, text_in
from trireme.ext.openai.wire import MOST_MESSAGES, Tools, Wire
from trireme.text import as_json

_SAME = ("model", "temperature", "top_p", "stream", "tool_choice", "parallel_tool_calls")
_KNOWN = {"input", "instructions", "tools", "max_output_tokens", "previous_response_id", "store"}
_ASIDE = {"metadata", "user", "truncation", "include", "reasoning", "text", "service_tier"}
_CALLED, _INPUT = ("function", "custom"), "input"
"""Kinds of tools that a reply may call, and the argument of the kind that takes free text."""
_LOGPROBS = "message.output_text.logprobs"
_ids = itertools.count()


KNOWN = {*_SAME, *_KNOWN, *_ASIDE}


class ResponsesBody(Wire):
    """`/v1/responses`."""

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    tools: Tools | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None


def chat_body(body: Mapping[str, Any], before: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Convert the request, a ResponsesBody, to one for chat completions, after the messages
    `before`.

    Keys outside of KNOWN have no effect.
    """
    chat: dict[str, Any] = {name: body[name] for name in _SAME if body.get(name) is not None}
    messages = list(before)
    if body.get("instructions"):
        if messages and messages[0]["role"] == "system":
            del messages[0]
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    start = len(messages)
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for item in items:
        _add(messages, item)
    chat["messages"] = messages if start > 1 else _one_system(messages)
    if tools := [_function(tool, name) for name, _, tool in _tools(body)]:
        chat["tools"] = tools
    elif body.get("tools"):
        chat.pop("tool_choice", None)  # of tools that are not here
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def response_of(completion: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a chat completion to a response."""
    choice = completion["choices"][0]
    output = []
    if choice["message"]["content"]:
        output.append(_message(choice["message"]["content"]))
    makers = {name: (space, tool) for name, space, tool in _tools(body)}
    output += [_call(call, makers) for call in choice["message"].get("tool_calls") or ()]
    return _response(completion, body, output, choice["finish_reason"], completion["usage"])


async def events_of(
    chunks: AsyncIterator[dict[str, Any]], body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Convert a stream's chunks to the events of a response."""
    number = itertools.count()
    makers = {name: (space, tool) for name, space, tool in _tools(body)}
    output: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    part_location: dict[str, Any] = {}
    text, ended, usage, chunk, begun = "", "stop", None, None, False

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(number), **fields}

    async for chunk in chunks:
        if not begun:
            begun = True
            yield event("response.created", response=_response(chunk, body, [], None, None))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            ended = choice["finish_reason"] or ended
            if piece := choice["delta"].get("content"):
                if item is None:
                    item = _message("")
                    begin = {**item, "status": "in_progress", "content": []}
                    yield event("response.output_item.added", output_index=0, item=begin)
                    part_location = {"item_id": item["id"], "output_index": 0, "content_index": 0}
                    part = item["content"][0]
                    yield event("response.content_part.added", **part_location, part=part)
                text += piece
                yield event("response.output_text.delta", **part_location, delta=piece, logprobs=[])
            for call in choice["delta"].get("tool_calls") or ():
                output.append(_call(call, makers))
    if item is not None:
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {**item, "content": [part]}
        yield event("response.output_text.done", **part_location, text=text, logprobs=[])
        yield event("response.content_part.done", **part_location, part=part)
        yield event("response.output_item.done", output_index=0, item=item)
    for index, call in enumerate(output, start=item is not None):
        field = "input" if call["type"] == "custom_tool_call" else "arguments"
        begin = {**call, "status": "in_progress", field: ""}
        location = {"item_id": call["id"], "output_index": index}
        yield event("response.output_item.added", output_index=index, item=begin)
        kind = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        yield event(f"response.{kind}.delta", **location, delta=call[field])
        name = {"name": call["name"]} if field == "arguments" else {}
        yield event(f"response.{kind}.done", **location, **name, **{field: call[field]})
        yield event("response.output_item.done", output_index=index, item=call)
    assert chunk is not None
    whole = _response(chunk, body, [*([item] if item else []), *output], ended, usage)
    kind = "response.incomplete" if ended == "length" else "response.completed"
    yield event(kind, response=whole)


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Append one item to the messages; a call belongs to the assistant's message before it."""
    match item.get("type", "message"):
        case "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": _content(item.get("content"))})
        case "function_call" | "custom_tool_call" as kind:
            name = _joined(item.get("namespace"), text_in(item, "name"))
            if kind == "custom_tool_call":
                arguments = as_json({_INPUT: text_in(item, _INPUT)})
            else:
                arguments = text_in(item, "arguments")
            function = {"name": name, "arguments": arguments}
            call = {"id": text_in(item, "call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            last = messages[-1]
            messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), call]}
        case "function_call_output" | "custom_tool_call_output":
            text = _content(item.get("output"))
            result = {"role": "tool", "tool_call_id": text_in(item, "call_id"), "content": text}
            messages.append(result)
        case "reasoning":
            pass
        case kind:
            raise ValueError(f"an input item of type '{kind!s:.40}' is not supported")


def _content(content: Any) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"an item holds {content!r:.60}: expected text, or a list of parts")
    return joined_parts(map(_part, content))


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else part
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": text_in(part, "image_url")}}
    if kind not in ("input_text", "output_text", "text"):
        raise ValueError(f"only text and pictures are supported, and this holds '{kind!s:.40}'")
    return {"type": "text", "text": text_in(part, "text")}


def _tools(body: Mapping[str, Any]) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Yield each tool that a reply may call: its name for the model, its namespace, and the tool.

    Raises ValueError for one without a name.
    """
    for tool in body.get("tools") or ():
        space = tool.get("name") if tool.get("type") == "namespace" else None
        for one in tool.get("tools") or () if space else (tool,):
            if not isinstance(one, Mapping):
                raise ValueError(f"a tool of the namespace '{space!s:.40}' is {one!r:.60}")
            if one.get("type") in _CALLED:
                yield _joined(space, text_in(one, "name")), space, one


def without_effect(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of a request that have no effect here: unknown keys, a format of the text,
    its log-probabilities, and tools that OpenAI's servers run.
    """
    yield from body.keys() - KNOWN
    text = body.get("text")
    wanted = text.get("format") if isinstance(text, Mapping) else None
    if isinstance(wanted, Mapping) and wanted.get("type") not in (None, "text"):
        yield f"text.format: {wanted['type']!s:.40}"
    more = body.get("include")
    if isinstance(more, list) and _LOGPROBS in more:
        yield f"include: {_LOGPROBS}"
    for tool in body.get("tools") or ():
        kind = tool.get("type")
        if kind not in (*_CALLED, "namespace"):
            yield f"tools: {kind!s:.40}"


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert a tool to a function; one with free text as input has that as its only argument."""
    function = {n: tool[n] for n in ("description", "parameters", "strict") if tool.get(n)}
    if tool["type"] == "custom":
        text = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
        function["parameters"] = text
    return {"type": "function", "function": {"name": name, **function}}


def _joined(space: Any, name: str) -> str:
    return f"{space}__{name}" if isinstance(space, str) and space else name


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the system's first messages into one: many chat templates accept no second."""
    first = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    if len(first) < 2:
        return messages
    parts: list[dict[str, Any]] = []
    for message in first:
        content = message["content"]
        gap = [{"type": "text", "text": "\n\n"}] if parts else []
        own = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts += [*gap, *own]
    return [{"role": "system", "content": joined_parts(parts)}, *messages[len(first) :]]


def _message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    about = {"id": f"msg_{next(_ids)}", "type": "message", "role": "assistant"}
    return {**about, "status": "completed", "content": [part]}


def _call(
    call: Mapping[str, Any], makers: Mapping[str, tuple[str | None, Mapping[str, Any]]]
) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    space, tool = makers.get(name, (None, {"type": "function", "name": name}))
    about = {"status": "completed", "call_id": call["id"], "name": tool["name"]}
    if space is not None:
        about["namespace"] = space
    if tool["type"] == "custom":
        text = json.loads(arguments).get(_INPUT)
        said = text if isinstance(text, str) else arguments
        return {"id": f"ctc_{next(_ids)}", "type": "custom_tool_call", **about, _INPUT: said}
    about = {"id": f"fc_{next(_ids)}", "type": "function_call", **about}
    return {**about, "arguments": arguments}


def _response(
    completion: Mapping[str, Any], body: Mapping[str, Any], output: Any, ended: Any, usage: Any
) -> dict[str, Any]:
    cut = ended == "length"
    status = "in_progress" if ended is None else "incomplete" if cut else "completed"
    counts = usage and {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
    return {
        "id": completion["id"],
        "object": "response",
        "created_at": completion["created"],
        "model": completion["model"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "output": output,
        "usage": counts,
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "metadata": body.get("metadata") or {},
    }

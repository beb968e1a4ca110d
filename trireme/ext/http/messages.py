"""Messages: Anthropic's `/v1/messages` in the terms of a chat completion, and back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from trireme.ext.openai.wire import Messages, Tools, Wire
from trireme.text import as_json

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_BLOCKS = {"reasoning_content": "thinking", "content": "text"}
"""Fields of a chat's message, and the blocks for them."""
_SIGNED = {"thinking": {"signature": ""}}
_ENDS = {"length": "max_tokens", "tool_calls": "tool_use"}


KNOWN = {*_SAME, "messages", "system", "tools", "tool_choice", "stop_sequences", "metadata"} | {
    *("thinking", "service_tier"),
}


class MessagesBody(Wire):
    """`/v1/messages` and `/v1/messages/count_tokens`."""

    messages: Messages
    system: str | Messages | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the request, a MessagesBody, to one for chat completions, without keys outside of
    KNOWN.

    Raises ValueError for anything that is not served.
    """
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    chat["messages"] = [m for message in body["messages"] for m in _messages(message)]
    if body.get("system"):
        system = {"role": "system", "content": _text(body["system"])}
        chat["messages"].insert(0, system)
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in body["tools"] if not _of_server(tool)]
    choice = body.get("tool_choice") or {}
    kinds = {"auto": "auto", "none": "none", "any": "required"}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    kind = choice.get("type", "auto")
    if not isinstance(kind, str) or (kind not in kinds and kind != "tool"):
        raise ValueError(f"tool_choice is {kind!r:.40}: expected auto, any, none or tool")
    chat["tool_choice"] = kinds.get(kind, named)
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _of_server(tool: Mapping[str, Any]) -> bool:
    """Return whether Anthropic's servers run a tool: such a tool has its own kind and no schema."""
    return tool.get("type", "custom") != "custom" and "input_schema" not in tool


def without_effect(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of a request that have no effect here: unknown keys, and tools that
    Anthropic's servers run.
    """
    yield from body.keys() - KNOWN
    yield from (f"tools: {t['type']!s:.40}" for t in body.get("tools") or () if _of_server(t))


def message_of(response: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a chat completion to a message."""
    choice, usage = response["choices"][0], response["usage"]
    content: list[dict[str, Any]] = []
    if thought := choice["message"].get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if choice["message"]["content"]:
        content.append({"type": "text", "text": choice["message"]["content"]})
    for call in choice["message"].get("tool_calls") or ():
        content.append(_tool_use(call, json.loads(call["function"]["arguments"])))
    return {
        **_empty(response["id"], response["model"]),
        "content": content,
        **_end(choice),
        "usage": _usage(usage),
    }


async def events_of(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Convert a stream's chunks to the events of a message."""
    index, opened, begun = 0, "", False
    end: dict[str, Any] = {}
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    async for chunk in chunks:
        if not begun:
            begun = True
            yield {"type": "message_start", "message": _empty(chunk["id"], chunk["model"])}
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if choice["finish_reason"]:
                end = _end(choice)
            for field, kind in _BLOCKS.items():
                if not (text := choice["delta"].get(field)):
                    continue
                if opened not in ("", kind):
                    yield {"type": "content_block_stop", "index": index}
                    index, opened = index + 1, ""
                if not opened:
                    opened = kind
                    yield _start(index, {"type": kind, kind: ""} | _SIGNED.get(kind, {}))
                yield _delta(index, {"type": f"{kind}_delta", kind: text})
            for call in choice["delta"].get("tool_calls") or ():
                if opened:
                    yield {"type": "content_block_stop", "index": index}
                    index, opened = index + 1, ""
                yield _start(index, _tool_use(call, {}))
                arguments = call["function"]["arguments"]
                yield _delta(index, {"type": "input_json_delta", "partial_json": arguments})
                yield {"type": "content_block_stop", "index": index}
                index += 1
    if opened:
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": end, "usage": _usage(usage)}
    yield {"type": "message_stop"}


def _messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert one message to those of a chat: results of tools are separate messages."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return [{"role": message.get("role"), "content": content or ""}]
    out: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in _blocks(content):
        match block.get("type"):
            case "text" | "image":
                parts.append(_part(block))
            case "tool_use":
                arguments = as_json(block.get("input", {}))
                function = {"name": text_in(block, "name"), "arguments": arguments}
                calls.append({"id": text_in(block, "id"), "type": "function", "function": function})
            case "thinking" | "redacted_thinking":
                pass  # the record has it, token for token
            case "tool_result":
                result = {"role": "tool", "tool_call_id": text_in(block, "tool_use_id")}
                out.append({**result, "content": _content(block.get("content") or "")})
            case kind:
                raise ValueError(
                    f"a message holds '{kind}': expected text, image, tool_use, tool_result"
                )
    if parts or calls:
        said = {"role": message.get("role"), "content": joined_parts(parts)}
        out.append({**said, "tool_calls": calls} if calls else said)
    return out


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Return the content of a tool's result."""
    return content if isinstance(content, str) else joined_parts(map(_part, _blocks(content)))


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a block of text, or a picture with its bytes, to a part of a chat's message."""
    if block.get("type") == "text":
        return {"type": "text", "text": text_in(block, "text")}
    source = block.get("source")
    if block.get("type") != "image" or not isinstance(source, Mapping):
        kind = block.get("type")
        raise ValueError(f"only text and pictures are supported, and this holds '{kind!s:.40}'")
    if source.get("type") != "base64":
        raise ValueError(f"a picture's source is {source.get('type')!r:.40}: expected base64")
    url = f"data:{text_in(source, 'media_type')};base64,{text_in(source, 'data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def joined_parts(parts: Iterable[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts of a message as its content: one text, unless there is a picture."""
    parts = list(parts)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = _blocks(content)
    for block in blocks:
        if block.get("type") != "text":
            raise ValueError(f"only text is supported, and this holds '{block.get('type')!s:.40}'")
    return "".join(text_in(block, "text") for block in blocks)


def _blocks(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ValueError(f"content is {content!r:.60}: expected text, or a list of blocks")
    return content


def text_in(block: Mapping[str, Any], name: str) -> str:
    """Return a field of a block or an item. Raises ValueError if it is not text."""
    if not isinstance(block.get(name), str):
        kind = block.get("type", "item")
        raise ValueError(f"'{name}' of a {kind!s:.40} is {block.get(name)!r:.60}: expected text")
    return block[name]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise ValueError(f"a tool is {tool!r:.60}: a tool needs 'name' and 'input_schema'")
    function = {"name": tool["name"], "description": tool.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_use(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": call["function"]["name"],
        "input": arguments,
    }


def _empty(name: str, model: str) -> dict[str, Any]:
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _usage(usage: Mapping[str, int]) -> dict[str, int]:
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}


def _end(choice: Mapping[str, Any]) -> dict[str, Any]:
    stop = choice["stop_reason"] if isinstance(choice.get("stop_reason"), str) else None
    reason = "stop_sequence" if stop else _ENDS.get(choice["finish_reason"], "end_turn")
    return {"stop_reason": reason, "stop_sequence": stop}


def _start(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}

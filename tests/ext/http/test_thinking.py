"""Clients of a served rollout get its thinking apart, and what was sampled is what is trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.ext.openai.test_thinking import THOUGHT, model_of
from tests.ext.openai.test_tool_calls import Telling
from tests.model.fake import user
from tests.model.templates import THINKING
from trireme import Model
from trireme.ext.http.gateway import Gateway
from trireme.ext.http.messages import events_of, message_of
from trireme.ext.http.rollouts import Rollouts
from trireme.ext.openai.answer import respond, stream
from trireme.model.chat_tokens import ChatTokens, ReasoningParser

ASKED: list[Any] = [{"role": "user", "content": "1 + 1?"}]
OPENS = THINKING.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think>\n' }}")
"""As THINKING, but the prompt has begun to think."""
REPLIES = {
    ("qwen3", THINKING): "<think>\nOne, and\none.\n</think>\n\nTwo.",
    ("qwen3", OPENS): "One, and\none.\n</think>\n\nTwo.",
    ("deepseek_r1", THINKING): "<think>\nOne, and\none.\n</think>\n\nTwo.",
    ("deepseek_r1", OPENS): "One, and\none.\n</think>\n\nTwo.",
}


@asynccontextmanager
async def served(
    parser: ReasoningParser, template: str, reply: str
) -> AsyncIterator[tuple[Model, httpx.AsyncClient]]:
    """A rollout's Model, and a client of its address."""
    engine: Any = Telling([reply])
    chat = ChatTokens(engine.tokenizer, chat_template=template, reasoning_parser=parser)
    gateway = Gateway(Rollouts(engine, chat, "fake", 4000))
    model = Model(engine, chat, max_model_len=4000, gateway=gateway.address)
    headers = {"x-api-key": model.api_key}
    async with httpx.AsyncClient(base_url=model.base_url, headers=headers) as client:
        yield model, client
    await gateway.close()


def events_in(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if "data: {" in line]
    return [json.loads(line) for line in lines]


async def by_openai(client: httpx.AsyncClient, *, streamed: bool) -> tuple[str, str]:
    body = {"model": "any", "messages": ASKED, "stream": streamed}
    answer = await client.post("/chat/completions", json=body)
    if not streamed:
        message = answer.json()["choices"][0]["message"]
        return message["reasoning_content"], message["content"]
    deltas = [event["choices"][0]["delta"] for event in events_in(answer.text)]
    kinds = [k for delta in deltas for k in ("reasoning_content", "content") if delta.get(k)]
    assert kinds == sorted(kinds, reverse=True)  # no thinking behind the answer
    return (
        "".join(delta.get("reasoning_content") or "" for delta in deltas),
        "".join(delta.get("content") or "" for delta in deltas),
    )


async def by_anthropic(client: httpx.AsyncClient, *, streamed: bool) -> tuple[str, str]:
    body = {"model": "any", "messages": ASKED, "max_tokens": 99, "stream": streamed}
    answer = await client.post("/messages", json=body)
    if not streamed:
        thinking, text = answer.json()["content"]
        return thinking["thinking"], text["text"]
    events = events_in(answer.text)
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [e["content_block"]["type"] for e in starts] == ["thinking", "text"]
    assert [e["index"] for e in starts] == [0, 1]
    deltas = [e for e in events if e["type"] == "content_block_delta"]
    assert [e["index"] for e in deltas] == sorted(e["index"] for e in deltas)
    return (
        "".join(e["delta"].get("thinking", "") for e in deltas),
        "".join(e["delta"].get("text", "") for e in deltas),
    )


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [by_openai, by_anthropic])
@pytest.mark.parametrize(("parser", "template"), list(REPLIES))
def test_a_served_rollout_tells_its_thinking_apart_and_records_what_was_sampled(
    parser: Any, template: str, ask: Any, streamed: bool
) -> None:
    async def main() -> None:
        reply = REPLIES[parser, template]
        async with served(parser, template, reply) as (model, client):
            assert await ask(client, streamed=streamed) == ("One, and\none.", "Two.")
            [experience] = model.experiences(reward=1.0)
            sampled = experience.tokens[experience.mask].tolist()
            assert model.chat_tokens.decode(sampled) == f"{reply}<|im_end|>"

    asyncio.run(main())


def test_anthropic_s_clients_get_blocks_of_thinking() -> None:
    body = {"messages": [user("1 + 1?")]}
    whole = message_of(asyncio.run(respond(model_of([THOUGHT]), body, chat=True)))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]

    async def run() -> list[Any]:
        chunks = stream(model_of([THOUGHT]), body | {"stream": True}, chat=True)
        return [event async for event in events_of(chunks)]

    events = asyncio.run(run())
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [(e["index"], e["content_block"]["type"]) for e in starts] == [
        (0, "thinking"),
        (1, "text"),
    ]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert len(deltas) > 4
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("text", "") for delta in deltas) == "Two."

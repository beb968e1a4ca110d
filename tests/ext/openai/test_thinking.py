"""Thinking is a field of its own for clients, and what was sampled stays one conversation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.ext.openai.test_tool_calls import TOOLS, Telling
from tests.model.fake import Say, engine_of, user
from tests.model.templates import THINKING
from trireme.ext.openai.answer import respond, stream
from trireme.model.chat_tokens import ChatTokens, ReasoningParser
from trireme.model.model import Model

THOUGHT = "<think>\nHm.\n</think>\n\nTwo."


def model_of(
    replies: list[Any], parser: ReasoningParser = "qwen3", template: str | None = None, **more: Any
) -> Model:
    engine: Any = Telling(replies)
    chat = ChatTokens(engine.tokenizer, chat_template=template, reasoning_parser=parser, **more)
    return Model(engine, chat, max_model_len=4000)


def ask(model: Model, **more: Any) -> Any:
    body = {"messages": [user("1 + 1?")]} | more
    return asyncio.run(respond(model, body, chat=True))["choices"][0]


def go_on(model: Model, change: Callable[[dict[str, Any]], Any] = dict) -> None:
    """Two turns, the second with the first reply as a client sends it back."""

    async def run() -> None:
        asked = [user("1 + 1?")]
        first = await respond(model, {"messages": asked}, chat=True)
        reply = change(first["choices"][0]["message"])
        await respond(model, {"messages": [*asked, reply, user("2 + 2?")]}, chat=True)

    asyncio.run(run())


def without_thinking(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": message["content"]}


def with_nulls(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"reasoning_content": None, "tool_calls": None}


def changed(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"reasoning_content": "Something else."}


@pytest.mark.parametrize(
    ("parser", "reply", "thought", "content"),
    [
        ("deepseek_r1", THOUGHT, "Hm.", "Two."),
        ("deepseek_r1", "Hm.\n</think>\n\nTwo.", "Hm.", "Two."),
        ("deepseek_r1", Say("Hm. Cut", stop_reason="length"), "Hm. Cut", None),
        ("qwen3", THOUGHT, "Hm.", "Two."),
        ("qwen3", "Hm.\n</think>\n\nTwo.", "Hm.", "Two."),
        ("qwen3", Say("<think>\nHm. Cut", stop_reason="length"), "Hm. Cut", None),
        ("qwen3", "Two.", None, "Two."),
        ("qwen3", "<think>\n\n</think>\n\nTwo.", "", "Two."),
        ("qwen3", "Two. </think> and </think>", "Two. ", "and </think>"),
    ],
)
def test_a_reply_is_its_thinking_and_the_rest(
    parser: Any, reply: Any, thought: str | None, content: str | None
) -> None:
    model = model_of([reply], parser)
    message = ask(model)["message"]
    assert message.get("reasoning_content") == thought
    assert (message["content"] or "").strip() == (content or "")
    assert content is not None or message["content"] is None
    [experience] = model.experiences(reward=1.0)
    said = reply if isinstance(reply, str) else reply.text
    assert str(experience.response_text).startswith(said)  # every sampled token, as it was


@pytest.mark.parametrize(
    ("opens", "parser", "thought"),
    [
        ("<think>\n", "qwen3", "Hm. Cut"),
        ("<think>\n\n</think>\n\n", "qwen3", None),
        ("<think>\n\n</think>\n\n", "deepseek_r1", None),
    ],
)
def test_the_prompt_says_whether_a_reply_begins_with_thinking(
    opens: str, parser: Any, thought: str | None
) -> None:
    template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}" + opens
    model = model_of([Say("Hm. Cut", stop_reason="length")], parser, template)
    assert ask(model)["message"].get("reasoning_content") == thought


@pytest.mark.parametrize("sent_back", [dict, without_thinking, with_nulls])
def test_what_the_client_sends_back_goes_on_from_the_recorded_ids(sent_back: Any) -> None:
    model = model_of([THOUGHT, "Four."])
    go_on(model, sent_back)
    first, second = engine_of(model).prompts
    [experience] = model.experiences(reward=1.0)
    sampled = experience.tokens[experience.mask].tolist()
    assert second[: len(first)] == first
    assert experience.tokens[: len(second)].tolist() == second
    assert model.chat_tokens.decode(sampled) == f"{THOUGHT}<|im_end|>Four.<|im_end|>"
    assert model.recorder.splits == 0


def test_thinking_that_a_client_changed_is_another_conversation() -> None:
    model = model_of([THOUGHT, "Four."])
    go_on(model, changed)
    assert len(model.experiences(reward=1.0)) == 2


def test_a_template_that_drops_thinking_splits_as_it_does_without_the_parser() -> None:
    model = model_of([THOUGHT, "Four."], template=THINKING)
    go_on(model)
    assert len(model.experiences(reward=1.0)) == 2 and model.recorder.splits == 1
    assert "Hm." not in model.chat_tokens.decode(engine_of(model).prompts[1])


def test_calls_stand_apart_from_thinking_and_the_answer() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"times": 1}}\n</tool_call>'
    choice = ask(model_of([f"<think>\nHm.\n</think>\n\nI look. {call}"]), tools=TOOLS)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"].strip()) == ("Hm.", "I look.")
    assert message["tool_calls"][0]["function"]["name"] == "look"
    assert choice["finish_reason"] == "tool_calls"


def test_a_stream_gives_the_thinking_and_then_the_rest() -> None:
    async def run() -> list[Any]:
        body = {"messages": [user("1 + 1?")], "stream": True}
        return [chunk async for chunk in stream(model_of([THOUGHT]), body, chat=True)]

    deltas = [chunk["choices"][0]["delta"] for chunk in asyncio.run(run())]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Two."
    assert ["reasoning_content" in delta for delta in deltas].index(True) == 0
    assert len(deltas) > 4  # as it comes


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize("opens", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_a_stream_s_pieces_are_the_whole_however_a_reply_looks(parser: Any, opens: str) -> None:
    draw = random.Random(opens)
    template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}" + opens
    parts = ["<think>", "</think>", "<thi", "</th", "<", "\n", "\n\n", " ", "Hm.", "Two", "STOP"]
    early = 0

    async def streamed(reply: str, **more: Any) -> dict[str, str]:
        nonlocal early
        found = {"reasoning_content": "", "content": ""}
        body = {"messages": [user("1 + 1?")], "stream": True, **more}
        deltas = []
        async for chunk in stream(model_of([reply], parser, template), body, chat=True):
            deltas.append(chunk["choices"][0]["delta"])
            for name in found:
                found[name] += deltas[-1].get(name) or ""
        early += sum("reasoning_content" in delta for delta in deltas) > 1
        return found

    for _ in range(60):
        reply = "".join(draw.choices(parts, k=draw.randint(1, 9)))
        more = {"stop": ["STOP"]} if draw.random() < 0.5 else {}
        body = {"messages": [user("1 + 1?")], **more}
        whole = asyncio.run(respond(model_of([reply], parser, template), body, chat=True))
        message = whole["choices"][0]["message"]
        told = asyncio.run(streamed(reply, **more))
        assert told["reasoning_content"] == (message.get("reasoning_content") or ""), repr(reply)
        assert told["content"] == (message["content"] or ""), repr(reply)
    assert early > 5

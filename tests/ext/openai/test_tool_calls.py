"""Tool calls: what a family's template renders, its format reads; cut calls; forced ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.model.fake import FakeEngine, Say
from tests.model.templates import THINKING
from trireme.engines.engine import Completion
from trireme.ext.openai.answer import respond, stream
from trireme.model.chat_tokens import ChatTokens
from trireme.model.conversation import text_before
from trireme.model.model import Model
from trireme.model.tool_calls import ToolCall

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "at": {"type": "string"},
                    "times": {"type": "integer"},
                    "deep": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}},
]
ARGUMENTS = {"at": 'a "b"\n{c}', "times": 3, "deep": {"x": [1, True]}}


def mine(text: str, tools: Any) -> tuple[str, list[ToolCall]]:
    before, found, name = text.partition("CALL ")
    return before, [ToolCall(name, {})] if found else []


class Telling(FakeEngine):
    """It tells each token as it comes."""

    async def generate(self, *args: Any, on_token: Any = None, **named: Any) -> list[Completion]:
        completions = await super().generate(*args, **named)
        for sample, c in enumerate(completions if on_token else ()):
            for token, logprob in zip(c.ids, c.logprobs, strict=True):
                on_token(sample, token, logprob, {})
        return completions


def model_of(replies: list[Any], parser: str | None = None, **more: Any) -> Model:
    engine: Any = Telling(replies)
    chat = ChatTokens(engine.tokenizer, tool_call_parser=parser, **more)
    return Model(engine, chat, max_model_len=4000)


def ask(model: Model, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS} | more
    if not more.get("stream"):
        return asyncio.run(respond(model, body, chat=True))["choices"][0]

    async def all_of() -> list[Any]:
        return [chunk["choices"][0] async for chunk in stream(model, body, chat=True)]

    return asyncio.run(all_of())


@pytest.mark.parametrize(
    ("choice", "reply", "begun"),
    [
        ("required", 'look", "arguments": {"times": 1}}\n</tool_call>', '{"name": "'),
        (
            {"type": "function", "function": {"name": "look"}},
            '{"times": 1}}\n</tool_call>',
            '{"name": "look", "arguments": ',
        ),
    ],
)
def test_a_call_that_has_to_be_is_begun_for_the_model_and_that_is_not_trained(
    choice: Any, reply: str, begun: str
) -> None:
    model = model_of([reply, "A cat."])
    user: Any = {"role": "user", "content": "hi"}

    async def both() -> tuple[Any, Any]:
        body = {"messages": [user], "tools": TOOLS}
        response = await respond(model, body | {"tool_choice": choice}, chat=True)
        found = response["choices"][0]
        [call] = found["message"]["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "cat"}
        await respond(model, body | {"messages": [user, found["message"], result]}, chat=True)
        return found, call

    found, call = asyncio.run(both())
    assert found["message"]["content"] is None and found["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == {"times": 1}
    engine: Any = model.engine
    begin = f"<|im_start|>assistant\n<tool_call>\n{begun}"
    assert engine.tokenizer.decode(engine.prompts[0]).endswith(begin)
    [experience] = model.experiences(reward=1.0)  # the second call goes on from the sampled ids
    sampled = engine.tokenizer.decode(experience.tokens[experience.mask].tolist())
    assert sampled == f"{reply}<|im_end|>A cat.<|im_end|>"


@pytest.mark.parametrize(("parallel", "given"), [(False, [1]), (True, [1, 2]), (None, [1, 2])])
@pytest.mark.parametrize("streams", [False, True])
def test_of_several_calls_a_client_gets_one_where_it_wants_no_parallel_ones(
    parallel: bool | None, given: list[int], streams: bool
) -> None:
    call = '<tool_call>\n{"name": "wait", "arguments": {"s": %d}}\n</tool_call>'
    made = [call % 1, call % 2]
    model, user = model_of(["\n".join(made), "Done."]), {"role": "user", "content": "hi"}
    found = ask(model, parallel_tool_calls=parallel, stream=streams)
    if streams:
        calls = [c for choice in found for c in choice["delta"].get("tool_calls") or ()]
        assert found[-1]["finish_reason"] == "tool_calls"
    else:
        calls = found["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"])["s"] for call in calls] == given
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "waited"}
    model._loop = None  # each `ask` has one of its own
    ask(model, messages=[user, said, result])
    [experience] = model.experiences(reward=1.0)  # all that was sampled is trained
    engine: Any = model.engine
    sampled = engine.tokenizer.decode(experience.tokens[experience.mask].tolist())
    assert sampled == f"{made[0]}\n{made[1]}<|im_end|>Done.<|im_end|>"


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_was_begun_and_cut_is_shown_with_its_beginning(streams: bool) -> None:
    cut, user = Say('look", "argu', stop_reason="length"), {"role": "user", "content": "hi"}
    model = model_of([cut, "A cat."])
    found = ask(model, tool_choice="required", stream=streams)
    if streams:
        content = "".join(choice["delta"].get("content") or "" for choice in found)
    else:
        content = found["message"]["content"]
    assert content == '<tool_call>\n{"name": "look", "argu'
    [call] = model.recorder
    assert text_before(call) == '<tool_call>\n{"name": "'
    model._loop = None  # each `ask` has one of its own
    ask(model, messages=[user, {"role": "assistant", "content": content}, user])
    assert len(model.experiences(reward=1.0)) == 1  # the second call goes on from the sampled ids


def test_a_cut_call_stays_text_and_a_choice_that_cannot_be_is_refused() -> None:
    cut = Say('<tool_call>\n{"name": "look", "argu', stop_reason="length")
    found = ask(model_of([cut]))
    assert found["message"]["content"] == cut.text and found["finish_reason"] == "length"
    for choice in ("sometimes", {"type": "function", "function": {"name": "run"}}):
        with pytest.raises(ValueError, match="the tools are look, wait"):
            ask(model_of([]), tool_choice=choice)


MENTIONED = '<tool_call>{"name": "look", "arguments": {"times": 9}}</tool_call>'
REAL = '<tool_call>{"name": "look", "arguments": {"at": "</think>"}}</tool_call>'
OPENS = THINKING.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think>\n' }}")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("template", "begin"), [(THINKING, "<think>"), (OPENS, "")])
@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("reply", "called"),
    [
        (f"I could {MENTIONED} but no.</think>It is 4.", {}),
        (f"I answer inside <tool_call> tags.</think>{REAL}", {"at": "</think>"}),
        (f"I could {MENTIONED}, but where", {}),
    ],
)
def test_calls_that_the_thinking_mentions_are_none(
    reply: str, called: Any, reasoning: Any, template: str, begin: str, streams: bool
) -> None:
    reply = begin + reply
    chat: Any = {"reasoning_parser": reasoning, "chat_template": template}
    model = model_of([reply], **chat)
    found = ask(model, stream=streams)
    parts = [choice["delta"] for choice in found] if streams else [found["message"]]
    calls = [c for part in parts for c in part.get("tool_calls") or []]
    thought, said = (
        "".join(part.get(field) or "" for part in parts)
        for field in ("reasoning_content", "content")
    )
    assert [json.loads(c["function"]["arguments"]) for c in calls] == ([called] if called else [])
    thinking, end, answer = reply.partition("</think>")
    answer = "" if called else answer
    if reasoning is None:
        assert (thought, said) == ("", thinking + end + answer)
    else:
        assert (thought, said) == (thinking.removeprefix("<think>"), answer)
    if streams:  # the thinking is sent before the reply's end
        assert sum(bool(part.get("reasoning_content") or part.get("content")) for part in parts) > 9
    sampled = model.experiences(reward=1.0)[0]
    assert model.chat_tokens.decode(sampled.tokens[sampled.mask].tolist()) == f"{reply}<|im_end|>"

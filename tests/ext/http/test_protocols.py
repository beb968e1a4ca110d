"""Messages and responses: other protocols onto the same recorded conversations."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
import openai
import pytest

from tests.ext.http.made import client_of, rollouts_over
from tests.model.fake import TOKENIZER, FakeEngine, Say
from trireme.ext.http import messages, responses

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
SCHEMA: Any = {"type": "object", "properties": {}}


def rollouts(*replies: str | Say) -> tuple[FakeEngine, Any]:
    engine = FakeEngine(replies)
    return engine, rollouts_over(engine, TOKENIZER, max_model_len=4000)


async def recorded(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    await http.post("/feedback", json={"reward": 1.0, "session_id": "one"})
    return (await http.post("/commit", json={"session_id": "one"})).json()["experiences"]


async def ask(http: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """A message, put together from events where it is streamed."""
    answer = await http.post("/s/one/v1/messages", json=body | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:5] == "data:"]
    names = [line[7:] for line in answer.text.splitlines() if line[:6] == "event:"]
    assert names == [e["type"] for e in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    blocks: list[Any] = []
    for e in events:
        if e["type"] == "content_block_start":
            assert e["index"] == len(blocks)
            blocks.append(dict(e["content_block"]))
        elif e["type"] == "content_block_delta":
            if e["delta"]["type"] == "text_delta":
                blocks[e["index"]]["text"] += e["delta"]["text"]
            else:
                blocks[e["index"]]["input"] = json.loads(e["delta"]["partial_json"])
    assert names.count("content_block_stop") == len(blocks)
    end = events[-2]
    return {**events[0]["message"], "content": blocks, **end["delta"], "usage": end["usage"]}


@pytest.mark.parametrize("stream", [False, True])
def test_messages_with_tools_go_on_from_the_sampled_ids(stream: bool) -> None:
    async def main() -> None:
        engine, made = rollouts(f"I look.{CALL}", "A cat.")
        async with client_of(made) as http:
            body: dict[str, Any] = {
                "model": "m",
                "max_tokens": 99,
                "system": [{"type": "text", "text": "Be brief."}],
                "tools": [{"name": "look", "input_schema": SCHEMA}],
                "messages": [{"role": "user", "content": "hi"}],
            }
            first = await ask(http, body, stream)
            assert first["stop_reason"] == "tool_use" and first["role"] == "assistant"
            text, use = first["content"]
            assert text == {"type": "text", "text": "I look."}
            assert (use["name"], use["input"]) == ("look", {"at": "x"})
            assert first["usage"]["output_tokens"] == len(f"I look.{CALL}") + 1
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": "cat"}
            body["messages"] += [
                {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
            ]
            second = await ask(http, body, stream)
            assert second["content"] == [{"type": "text", "text": "A cat."}]
            assert (second["stop_reason"], second["stop_sequence"]) == ("end_turn", None)
            prompt = TOKENIZER.decode(engine.prompts[1])
            assert "system\nBe brief.<|im_end|>" in prompt and "tool\ncat<|im_end|>" in prompt
            (experience,) = await recorded(http)
            assert experience["tokens"][: len(engine.prompts[1])] == engine.prompts[1]
            assert sum(experience["mask"]) == len(f"I look.{CALL}A cat.") + 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
        ({"type": "none"}, "none"),
        (None, "auto"),
    ],
)
def test_a_message_s_tool_choice_in_the_terms_of_a_chat(choice: Any, expected: Any) -> None:
    body = {"messages": [{"role": "user", "content": "1"}], "tool_choice": choice}
    assert messages.chat_body(body)["tool_choice"] == expected


def test_a_message_that_wants_one_tool_at_a_time() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    body = {"messages": [{"role": "user", "content": "1"}], "tool_choice": choice}
    chat = messages.chat_body(body)
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("auto", False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_says_why_it_ended(stream: bool) -> None:
    async def main() -> None:
        _, made = rollouts(Say("ab", stop_reason="length"), Say("ab", stop="X", behind="X"))
        async with client_of(made) as http:
            body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "1"}]}
            assert (await ask(http, body, stream))["stop_reason"] == "max_tokens"
            found = await ask(http, body | {"stop_sequences": ["X"]}, stream)
            assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "X")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": None}, "messages: Input should be a valid list, and it is None"),
        ({"tool_choice": {"type": "some"}}, "tool_choice is 'some': expected auto, any"),
        ({"tool_choice": {"type": ["auto"]}}, "tool_choice is ['auto']: expected auto, any"),
        ({"tool_choice": {"type": "any"}}, "with tools required"),
        ({"tools": [{}]}, "a tool needs 'name'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "holds 'image'"),
    ],
)
def test_a_message_that_cannot_be_served_is_refused(change: Any, message: str) -> None:
    async def main() -> None:
        _, made = rollouts()
        async with client_of(made) as http:
            body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "1"}]}
            answer = await http.post("/v1/messages", json=body | change)
            assert answer.status_code == 400 and message in answer.json()["error"]["message"]

    asyncio.run(main())


async def respond(client: openai.AsyncOpenAI, stream: bool, **options: Any) -> Any:
    if not stream:
        return await client.responses.create(model="m", **options)
    last, text = None, ""
    async for event in await client.responses.create(model="m", stream=True, **options):
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert last is not None and last.type == "response.completed"
    assert text == last.response.output_text
    return last.response


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_responses_with_tools_go_on_from_the_sampled_ids(stream: bool, by_id: bool) -> None:
    async def main() -> None:
        engine, made = rollouts(f"I look.{CALL}", "A cat.")
        async with client_of(made) as http:
            client = openai.AsyncOpenAI(
                api_key="x", base_url="http://localhost/s/one/v1", http_client=cast(Any, http)
            )
            options: dict[str, Any] = {
                "instructions": "Be brief.",
                "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
            }
            first = await respond(client, stream, input="hi", **options)
            assert first.output_text == "I look." and first.status == "completed"
            call = first.output[1]
            assert (call.type, call.name, json.loads(call.arguments)) == (
                *("function_call", "look"),
                {"at": "x"},
            )
            assert first.usage.output_tokens == len(f"I look.{CALL}") + 1
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "cat"}
            given: list[Any] = [result]
            if by_id:
                options["previous_response_id"] = first.id
            else:
                made_before = [item.model_dump() for item in first.output]
                given = [{"role": "user", "content": "hi"}, *made_before, result]
            second = await respond(client, stream, input=given, **options)
            assert second.output_text == "A cat."
            (experience,) = await recorded(http)
            assert experience["tokens"][: len(engine.prompts[1])] == engine.prompts[1]
            assert sum(experience["mask"]) == len(f"I look.{CALL}A cat.") + 2

    asyncio.run(main())


def test_responses_that_go_on_with_a_reply_stay_in_its_session() -> None:
    async def main() -> None:
        _, made = rollouts("One.", "Two.", "Three.")
        async with client_of(made) as http:
            body: dict[str, Any] = {"input": "hi"}
            for _ in range(3):
                reply = (await http.post("/v1/responses", json=body)).json()
                body = {"input": "more", "previous_response_id": reply["id"]}
            assert "\ntrireme_sessions_open 1\n" in (await http.get("/metrics")).text

    asyncio.run(main())


SPACE: dict[str, Any] = {"type": "namespace", "name": "n"}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_namespaces_and_of_free_text_are_called_by_responses(stream: bool) -> None:
    patch = '<tool_call>\n{"name": "patch", "arguments": {"input": "+ a"}}\n</tool_call>'

    async def main() -> None:
        engine, made = rollouts(CALL.replace("look", "n__look") + patch, "Done.")
        async with client_of(made) as http:
            client = openai.AsyncOpenAI(
                api_key="x", base_url="http://localhost/s/one/v1", http_client=cast(Any, http)
            )
            look = {"type": "function", "name": "look", "parameters": SCHEMA}
            tools: list[Any] = [SPACE | {"tools": [look]}, {"type": "custom", "name": "patch"}]
            options: dict[str, Any] = {"tools": [*tools, {"type": "web_search"}]}
            first = await respond(client, stream, input="hi", **options)
            one, two = first.output
            assert (one.type, one.namespace, one.name) == ("function_call", "n", "look")
            assert (two.type, two.name, two.input) == ("custom_tool_call", "patch", "+ a")
            results = [
                {"type": f"{item.type}_output", "call_id": item.call_id, "output": "ok"}
                for item in first.output
            ]
            before = [item.model_dump() for item in first.output]
            given: list[Any] = [{"role": "user", "content": "hi"}, *before, *results]
            second = await respond(client, stream, input=given, **options)
            assert second.output_text == "Done."
            (experience,) = await recorded(http)
            assert experience["tokens"][: len(engine.prompts[1])] == engine.prompts[1]
            counted = (await http.get("/metrics")).text
            assert "trireme_request_keys_ignored_total 2" in counted  # web_search, twice

    asyncio.run(main())


def test_messages_of_the_system_that_begin_a_response_are_one() -> None:
    items = [{"role": "developer", "content": text} for text in ("a", "b")]
    body = {"instructions": "i", "input": [*items, {"role": "user", "content": "c"}]}
    said = responses.chat_body(body, [])["messages"]
    assert [(m["role"], m["content"]) for m in said] == [("system", "i\n\na\n\nb"), ("user", "c")]
    url = "data:image/png;base64,cG5n"
    shown = {"role": "developer", "content": [{"type": "input_image", "image_url": url}]}
    [system, _] = responses.chat_body({**body, "input": [shown, items[0], body["input"][2]]}, [])[
        "messages"
    ]
    texts = [part.get("text") for part in system["content"]]
    assert texts == ["i", "\n\n", None, "\n\n", "a"]
    assert system["content"][2]["image_url"] == {"url": url}


def test_what_a_response_cannot_have_is_counted_and_a_key_is_not_taken_for_a_misspelt_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = {"format": {"type": "json_schema", "name": "x", "schema": {}}, "verbosity": "low"}
    shown = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    options: dict[str, Any] = {"text": asked, "include": shown, "top_logprobs": 2}

    async def main() -> None:
        _, made = rollouts("a", "b")
        async with client_of(made) as http:
            for more in (options, {"text": {"format": {"type": "text"}}}):
                answer = await http.post("/v1/responses", json={"input": "hi", **more})
                assert answer.status_code == 200
            assert "trireme_request_keys_ignored_total 3" in (await http.get("/metrics")).text

    asyncio.run(main())
    names = ("top_logprobs", "text.format: json_schema", f"include: {shown[1]}")
    said = [f"the key '{name}' of a request has no effect here" for name in names]
    assert sorted(caplog.messages) == sorted(said)


def test_a_tool_that_anthropic_s_servers_run_is_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    look = {"name": "look", "input_schema": SCHEMA}
    body = {"messages": [{"role": "user", "content": "1"}], "tools": [search, look]}
    assert [t["function"]["name"] for t in messages.chat_body(body)["tools"]] == ["look"]
    assert list(messages.without_effect(body)) == ["tools: web_search_20250305"]


def test_a_response_that_cannot_be_served_is_refused() -> None:
    async def main() -> None:
        _, made = rollouts()
        async with client_of(made) as http:
            for body, message in (
                ({"input": 3}, "the request's input.str: Input should be a valid string"),
                ({"input": "a", "previous_response_id": "x"}, "reply 'x' is not known"),
                ({"input": [{"type": "image"}]}, "of type 'image'"),
                ({"input": "a", "tools": [{"type": "function"}]}, "'name' of a function is None"),
                ({"input": "a", "tools": [SPACE | {"tools": [3]}]}, "of the namespace 'n' is 3"),
            ):
                answer = await http.post("/v1/responses", json=body)
                assert answer.status_code == 400
                assert message in answer.json()["error"]["message"]

    asyncio.run(main())

"""The OpenAI endpoints with the real client: streams, tools, sessions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from tests.ext.http.made import client_of, on_port, rollouts_over, torch_rollouts
from tests.model.fake import TOKENIZER, FakeEngine
from trireme.engines.scripted import ScriptedEngine
from trireme.ext.multi_turn.scheduler import ChatMessage, RolloutResponseChoice
from trireme.ext.multi_turn.tool_calls import read_calls

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
USER: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def agent(
    replies: Sequence[str], session: str = "one"
) -> AsyncIterator[tuple[openai.AsyncOpenAI, FakeEngine, Any]]:
    engine = FakeEngine(replies)
    rollouts = rollouts_over(engine, TOKENIZER, max_model_len=4000)
    async with client_of(rollouts) as http:
        client = openai.AsyncOpenAI(
            api_key="x",
            base_url=f"http://localhost/s/{session}/v1",
            http_client=cast(Any, http),
            max_retries=0,
        )
        yield client, engine, http


def test_a_client_finds_the_model_by_its_name_and_the_time_of_an_answer() -> None:
    async def main() -> None:
        async with agent(["yes", "no"]) as (client, _, http):
            [listed] = (await client.models.list()).data
            assert (await client.models.retrieve(listed.id)) == listed
            with pytest.raises(openai.NotFoundError, match="no model 'gpt-9': this server has '"):
                await client.models.retrieve("gpt-9")
            before = int(time.time())
            chat = await client.chat.completions.create(model="m", messages=USER)
            answer = (await http.post("/v1/responses", json={"input": "hi"})).json()
            for made in (chat.created, answer["created_at"]):
                assert before <= made <= time.time()

    asyncio.run(main())


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("options", [{}, {"stop": ["e", "a"]}, {"n": 2}])
def test_a_stream_says_what_the_whole_response_says_piece_by_piece(
    tiny_dir: Path, chat: bool, options: dict[str, Any]
) -> None:
    async def ask(stream: bool) -> Any:
        async with torch_rollouts(tiny_dir) as rollouts, on_port(rollouts) as url:
            client = openai.AsyncOpenAI(api_key="x", base_url=f"{url}/s/x/v1", max_retries=0)
            more: Any = {"max_tokens": 30, "model": "m", "extra_body": {"ignore_eos": True}}
            more |= options
            if stream:
                more |= {"stream": True, "stream_options": {"include_usage": True}}
            if chat:
                got = await client.chat.completions.create(messages=USER, logprobs=True, **more)
            else:
                got = await client.completions.create(prompt="hi", logprobs=0, **more)
            return [chunk async for chunk in got] if stream else got

    whole, chunks = asyncio.run(ask(False)), asyncio.run(ask(True))
    for index, choice in enumerate(whole.choices):
        parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        texts = [(p.delta.content if chat else p.text) or "" for p in parts]
        assert "".join(texts) == (choice.message.content if chat else choice.text)
        if not options:
            assert len([text for text in texts if text]) > 20
        assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]
        told: list[float] = []
        for p in parts:
            if p.logprobs:
                told += (
                    [t.logprob for t in p.logprobs.content] if chat else p.logprobs.token_logprobs
                )
        rows = choice.logprobs
        want = [t.logprob for t in rows.content] if chat else rows.token_logprobs
        assert told == pytest.approx(want, abs=1e-4)
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_has_the_ids_that_the_whole_response_has(
    tiny_dir: Path, path: str, logprobs: bool
) -> None:
    chat = "chat" in path
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
    }
    body |= {"messages": USER} if chat else {"prompt": "hi"}
    if logprobs:
        named = {"return_tokens_as_token_ids": True}
        body |= named | ({"logprobs": True} if chat else {"logprobs": 0})

    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, client_of(rollouts) as http:
            whole = (await http.post(path, json=body)).json()
            text = (await http.post(path, json=body | {"stream": True})).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if "{" in line]
        chunks = [json.loads(line) for line in lines]
        [choice], parts = whole["choices"], [chunk["choices"][0] for chunk in chunks]
        assert [id for part in parts for id in part["token_ids"]] == choice["token_ids"]
        place, last = (whole, chunks[-1]) if chat else (choice, parts[-1])
        assert last["prompt_token_ids"] == place["prompt_token_ids"]
        if logprobs:
            held = [part["logprobs"] for part in parts if part["logprobs"]]
            rows = (
                [row["token"] for one in held for row in one["content"]]
                if chat
                else [token for one in held for token in one["tokens"]]
            )
            assert rows == [f"token_id:{id}" for id in choice["token_ids"]]

    asyncio.run(main())


def test_an_engine_that_tells_no_tokens_streams_one_piece() -> None:
    async def main() -> None:
        async with agent(["hello"]) as (client, _, _http):
            stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
            deltas = [chunk.choices[0].delta.content async for chunk in stream]
            assert deltas == ["hello", None]

    asyncio.run(main())


class Breaks(ScriptedEngine):
    """Samples one token, and fails."""

    async def generate(self, ids: Any, sampling: Any, **options: Any) -> Any:
        options["on_token"](0, 5, -1.0, {})
        raise TimeoutError("no answer within 3 s")


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages"])
def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer: Any = TOKENIZER
    asked = {"prompt": "a"} if path == "completions" else {"messages": USER}
    body = asked | {"stream": True, "max_tokens": 9}

    async def main() -> str:
        rollouts = rollouts_over(Breaks([], tokenizer=tokenizer), tokenizer)
        async with client_of(rollouts) as client:
            return (await client.post(f"/v1/{path}", json=body)).text

    events = [line for line in asyncio.run(main()).splitlines() if line.startswith("data: {")]
    assert json.loads(events[-1][6:])["error"]["message"] == "no answer within 3 s"
    assert "failed in the middle of a stream" in caplog.text


def test_what_cannot_be_served_is_refused_before_a_stream_begins() -> None:
    async def main() -> None:
        async with agent([]) as (client, _, _http):
            with pytest.raises(openai.BadRequestError, match="top_p is 3"):
                await client.chat.completions.create(
                    model="m", messages=USER, stream=True, top_p=3.0
                )

    asyncio.run(main())


def test_a_picture_that_is_no_data_url_is_refused_in_one_sentence() -> None:
    async def main() -> None:
        async with agent([]) as (client, _, _):
            url: Any = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": [url]}]
                )
            assert str(refused.value.message).endswith(
                "the request's messages: a picture is 'https://x/y.png': expected a data URL, as "
                "in {type: image_url, image_url: {url: data:image/png;base64,…}}"
            )

    asyncio.run(main())


def test_a_refused_call_leaves_no_session_unless_its_client_has_named_it() -> None:
    async def open_sessions(*, named: bool) -> str:
        async with agent([]) as (_, _, http):
            headers = {"x-session-id": "mine"} if named else {}
            for stream in (False, True):
                body = {"model": "m", "messages": USER, "top_p": 3.0, "stream": stream}
                answer = await http.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == 400
            figures = (await http.get("/metrics")).text.splitlines()
            return next(line for line in figures if line.startswith("trireme_sessions_open "))

    assert asyncio.run(open_sessions(named=False)) == "trireme_sessions_open 0"
    assert asyncio.run(open_sessions(named=True)) == "trireme_sessions_open 1"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_goes_on_from_the_sampled_ids(stream: bool) -> None:
    async def main() -> None:
        async with agent([f"I look.{CALL}", "A cat."]) as (client, engine, http):
            asked: Any = {"model": "m", "messages": USER, "tools": TOOLS}
            if stream:
                chunks = [
                    c async for c in await client.chat.completions.create(stream=True, **asked)
                ]
                deltas = [c.choices[0].delta for c in chunks]
                assert "".join(d.content or "" for d in deltas) == "I look."
                assert chunks[-1].choices[0].finish_reason == "tool_calls"
                [called] = [call for d in deltas for call in d.tool_calls or ()]
                call = called.model_dump(exclude={"index"})
                message: Any = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
            else:
                done = await client.chat.completions.create(**asked)
                assert done.choices[0].finish_reason == "tool_calls"
                message = done.choices[0].message.model_dump()
                [call] = message["tool_calls"]
            assert call["function"]["name"] == "look"
            assert json.loads(call["function"]["arguments"]) == {"at": "é"}
            # as a client may write it again
            call["function"]["arguments"] = '{"at":"\\u00e9"}'
            result = {"role": "tool", "tool_call_id": call["id"], "content": "cat"}
            asked["messages"] = [*USER, message, result]
            await client.chat.completions.create(**asked)
            text = TOKENIZER.decode(engine.prompts[1])
            assert f"I look.{CALL}<|im_end|>\n<|im_start|>tool\ncat<|im_end|>" in text.replace(
                "<unk>", "é"
            )
            await http.post("/feedback", json={"reward": 1.0, "session_id": "one"})
            sent = (await http.post("/commit", json={"session_id": "one"})).json()
            (experience,) = sent["experiences"]
            ids = engine.prompts[1]
            assert experience["tokens"][: len(ids)] == ids
            assert sum(experience["mask"]) == len(f"I look.{CALL}") + len("A cat.") + 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        (CALL, "none"),
        ("<tool_call>{no json}</tool_call>", "auto"),
        ('<tool_call>{"arguments": {}}</tool_call>', "auto"),
    ],
)
def test_what_is_no_tool_call_stays_text(reply: str, choice: Any) -> None:
    async def main() -> None:
        async with agent([reply]) as (client, _, _http):
            done = await client.chat.completions.create(
                model="m", messages=USER, tools=TOOLS, tool_choice=choice, presence_penalty=0
            )
            assert done.choices[0].message.content == reply
            assert not done.choices[0].message.tool_calls
            assert done.choices[0].finish_reason == "stop"

    asyncio.run(main())


def test_a_call_whose_closing_tag_was_cut_is_a_call_here_as_it_is_for_a_scheduler() -> None:
    async def main() -> None:
        cut = CALL.removesuffix("</tool_call>")
        async with agent([cut]) as (client, _, _http):
            done = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
            [call] = done.choices[0].message.model_dump()["tool_calls"]
            choice = RolloutResponseChoice(0, ChatMessage("assistant", cut), "stop")
            [asked] = read_calls(choice).calls
            assert call["function"]["name"] == asked.name == "look"
            assert json.loads(call["function"]["arguments"]) == asked.arguments == {"at": "é"}

    asyncio.run(main())


def test_replies_are_rewarded_by_their_ids_also_when_they_come_at_once() -> None:
    async def main() -> None:
        engine = FakeEngine(lambda prompt: prompt[-24])
        async with client_of(rollouts_over(engine, TOKENIZER)) as http:

            async def one(text: str) -> str:
                body = {"messages": [{"role": "user", "content": text}]}
                return (await http.post("/s/s/v1/chat/completions", json=body)).json()["id"]

            names = await asyncio.gather(*(one(text) for text in "123"))
            for reward, name in enumerate(names):
                await http.post("/feedback", json={"reward": reward, "msg_ids": [name]})
            sent = (await http.post("/commit", json={})).json()["experiences"]
            prompts = {e["reward"]: e["prompt_text"] for e in sent}
            assert ["1" in prompts[0], "2" in prompts[1], "3" in prompts[2]] == [True] * 3
            assert (await http.post("/commit", json={})).json()["committed"] == 0

    asyncio.run(main())


@pytest.mark.parametrize("streams", [False, True])
def test_half_a_surrogate_pair_in_a_call_reaches_the_client_as_a_character(streams: bool) -> None:
    call = r'<tool_call>{"name": "look\ud83d", "arguments": {"at": "\ude00\u0000"}}</tool_call>'

    async def main() -> None:
        async with agent([call, "seen"]) as (client, _, _):
            options: Any = {"model": "m", "tools": TOOLS, "stream": streams}
            answer = await client.chat.completions.create(messages=USER, **options)
            if streams:
                parts = [part async for part in answer]
                calls = [one for part in parts for one in part.choices[0].delta.tool_calls or []]
            else:
                calls = answer.choices[0].message.tool_calls
            asked = {"name": calls[0].function.name, "arguments": calls[0].function.arguments}
            assert asked["name"] == "look\ufffd"
            assert json.loads(asked["arguments"]) == {"at": "\ufffd\0"}
            made = {"id": calls[0].id, "type": "function", "function": asked}
            said: Any = [{"role": "assistant", "content": "", "tool_calls": [made]},
                    {"role": "tool", "tool_call_id": calls[0].id, "content": "yes"}]  # fmt: skip
            options["stream"] = False
            last = await client.chat.completions.create(messages=[*USER, *said], **options)
            assert last.choices[0].message.content == "seen"

    asyncio.run(main())

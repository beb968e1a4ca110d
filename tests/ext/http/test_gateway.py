"""Gateway: each rollout's own address, with a key of its own, on loopback alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.model.fake import FakeEngine
from trireme.ext.http.gateway import Gateway
from trireme.ext.http.rollouts import Rollouts
from trireme.model.address import Address
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model, Revoked

ASKED: Any = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def two_models(wait: float = 0.0) -> AsyncIterator[tuple[Gateway, Model, Model]]:
    engine: Any = FakeEngine(lambda _: "yes", wait=wait)
    chat = ChatTokens(engine.tokenizer)
    gateway = Gateway(Rollouts(engine, chat, "fake", 4000))
    make = [
        Model(engine, chat, key=((1, 0, ""), 7, n), max_model_len=4000, gateway=gateway.address)
        for n in range(2)
    ]
    try:
        yield gateway, make[0], make[1]
    finally:
        await gateway.close()


async def post(address: Address, path: str, key: str, body: Any) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        root = address.base_url.removesuffix("/v1")
        return await client.post(f"{root}{path}", json=body, headers={"x-api-key": key})


def test_what_a_client_asks_there_is_recorded_by_the_rollout_s_own_model() -> None:
    async def main() -> None:
        async with two_models() as (_, one, other):
            for model in (one, other, one):
                client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
                async with client:
                    done = await client.chat.completions.create(**ASKED)
                assert done.choices[0].message.content == "yes"
            assert (len(one.recorder), len(other.recorder)) == (2, 1)
            assert (
                one.base_url.startswith("http://127.0.0.1:") and "/s/1-0-7-0-1/v1" in one.base_url
            )
            found = await post(one.address, "/v1/messages", one.api_key, ASKED | {"max_tokens": 9})
            assert found.json()["content"] == [{"type": "text", "text": "yes"}]
            body = ASKED | {"max_tokens": 9}
            counted = await post(one.address, "/v1/messages/count_tokens", one.api_key, body)
            assert counted.json()["input_tokens"] > 5 and len(one.recorder) == 3

    asyncio.run(main())


def test_another_key_or_none_is_refused_and_only_the_rollout_s_own_paths_are_served() -> None:
    async def main() -> None:
        async with two_models() as (_, one, other):
            address, chat = one.address, "/v1/chat/completions"
            for key in (other.api_key, "", "EMPTY"):
                refused = await post(address, chat, key, ASKED)
                assert refused.status_code == 401 and "requires its key" in refused.text
            outside = Address(address.base_url.partition("/s/")[0] + "/v1", "", lambda: None)
            for path in (chat, "/feedback", "/commit", "/engine/pause", "/metrics"):
                refused = await post(outside, path, one.api_key, ASKED)
                assert refused.status_code == 401 and "no rollout at this address" in refused.text
            assert not len(one.recorder)

    asyncio.run(main())


def test_a_reply_of_another_rollout_cannot_be_gone_on_with() -> None:
    async def main() -> None:
        async with two_models() as (_, one, other):
            first = await post(one.address, "/v1/responses", one.api_key, {"input": "hi"})
            body = {"input": "more", "previous_response_id": first.json()["id"]}
            refused = await post(other.address, "/v1/responses", other.api_key, body)
            assert refused.status_code == 400 and "belongs to another session" in refused.text
            assert (await post(one.address, "/v1/responses", one.api_key, body)).is_success
            assert (len(one.recorder), len(other.recorder)) == (2, 0)

    asyncio.run(main())


def test_an_address_ends_with_its_rollout_and_what_is_under_way_fails() -> None:
    async def main() -> None:
        async with two_models(wait=0.2) as (gateway, one, other):
            fork = one.fork()
            assert fork.base_url != one.base_url
            addresses = [one.address, fork.address]
            path = "/v1/chat/completions"
            asking = asyncio.ensure_future(post(one.address, path, one.api_key, ASKED))
            while not one.engine.prompts:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            one.revoke()
            assert (await asking).status_code == 500 and "is over" in (await asking).text
            for address in addresses:
                refused = await post(address, path, address.api_key, ASKED)
                assert refused.status_code == 401 and "or it has ended" in refused.text
            with pytest.raises(Revoked):
                _ = one.base_url
            assert (await post(other.address, path, other.api_key, ASKED)).is_success
            assert not len(one.recorder) and [*gateway._models] == ["1-0-7-1-3"]

    asyncio.run(main())


def test_a_body_that_comes_after_its_rollout_s_end_is_recorded_by_no_other_rollout() -> None:
    async def main() -> None:
        async with two_models() as (gateway, one, other):
            assert other.base_url
            body = json.dumps(ASKED).encode()
            root, _, path = one.base_url.removeprefix("http://").partition("/")
            host, _, port = root.partition(":")
            head = (
                f"POST /{path}/chat/completions HTTP/1.1\r\nhost: {root}\r\n"
                f"x-api-key: {one.api_key}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n"
            )
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + body[:9])
            assert b" 100 " in await reader.readuntil(b"\r\n\r\n")  # the key was looked at
            one.revoke()
            writer.write(body[9:])
            answer = await reader.readuntil(b"\r\n\r\n")
            assert b" 410 " in answer.partition(b"\r\n")[0]
            writer.close()
            assert not len(one.recorder) and not len(other.recorder)
            assert not len(gateway._sessions)

    asyncio.run(main())


def test_a_closed_gateway_begins_again_and_a_model_without_one_says_so() -> None:
    async def main() -> None:
        async with two_models() as (gateway, one, other):
            assert one.base_url and gateway._server is not None
            await gateway.close()
            found = await post(other.address, "/v1/chat/completions", other.api_key, ASKED)
            assert found.is_success
            alone = Model(one.engine, one.chat_tokens, max_model_len=4000)
            with pytest.raises(RuntimeError, match="this model has no address"):
                _ = alone.base_url

    asyncio.run(main())


def test_a_rollout_may_keep_its_own_sampling() -> None:
    async def main() -> None:
        async with two_models() as (_, one, _other):
            body = ASKED | {"temperature": 0.0, "seed": 1, "max_tokens": 5}
            for keeps in (False, True):
                one.keeps_sampling = keeps
                await post(one.address, "/v1/chat/completions", one.api_key, body)
            engine: Any = one.engine
            assert [s.temperature for s in engine.samplings] == [0.0, 1.0]
            assert [s.seed for s in engine.samplings] == [1, None]
            assert [s.max_tokens for s in engine.samplings] == [5, 5]

    asyncio.run(main())


def test_a_plain_workflow_finds_the_address_from_its_thread() -> None:
    async def main() -> None:
        async with two_models() as (_, one, _other):
            blocking = one.blocking()

            def ask() -> str:
                client = openai.OpenAI(base_url=blocking.base_url, api_key=blocking.api_key)
                with client:
                    done = client.chat.completions.create(**ASKED)
                return done.choices[0].message.content or ""

            assert await asyncio.to_thread(ask) == "yes"
            assert blocking.base_url == one.base_url and len(one.recorder) == 1

    asyncio.run(main())

"""Servers: what becomes of a call whose caller is cancelled, or whose server has ended."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from trireme.engines.engine import Sampling
from trireme.ext.http.room import MAX_BODY
from trireme.ext.remote.servers import RequestBatcher, ServerLost, Servers, _batches
from trireme.pictures import BEGIN

URL = "http://a"


def test_a_caller_that_is_cancelled_leaves_no_call_behind() -> None:
    async def main() -> None:
        ended = False

        async def call() -> None:
            nonlocal ended
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(10):  # a connection is closed
                    await asyncio.sleep(0)
                ended = True
                raise RuntimeError("it failed while it was cancelled")

        async with httpx.AsyncClient() as client:
            caller = asyncio.ensure_future(Servers([URL], client, None).answer(URL, call()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            caller.cancel()
            await asyncio.wait({caller})
            assert caller.cancelled() and ended
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.mark.parametrize("restarted", [False, True])
def test_a_caller_whose_server_ends_hears_so_and_is_not_cancelled(restarted: bool) -> None:
    async def main() -> None:
        async with httpx.AsyncClient() as client:
            servers = Servers([URL], client, None)
            servers.restarted = restarted
            caller = asyncio.ensure_future(servers.answer(URL, asyncio.Event().wait()))
            await asyncio.sleep(0)
            await servers.lose(URL)
            with pytest.raises(ServerLost, match=f"the rollout server {URL} is gone"):
                await caller

    asyncio.run(main())


def test_a_request_whose_caller_is_cancelled_before_it_is_sent_is_not_sent() -> None:
    """The server could not cancel what it does not know, and would generate it to its end."""

    async def main() -> list[list[int]]:
        sent: list[list[int]] = []

        def reply(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/engine/stream":
                sent.extend(one["ids"] for one in json.loads(request.content)["requests"])
            return httpx.Response(200, content=b'{"index": 0, "completions": []}\n')

        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            batcher = RequestBatcher(client, URL, lambda _: None, timeout=10.0)
            asks = [{"ids": [number], "sampling": {"n": 1}} for number in range(2)]
            gone, stays = (asyncio.ensure_future(batcher.ask(one)) for one in asks)
            await asyncio.sleep(0)
            gone.cancel()
            assert await stays == []
            await batcher.close()
        return sent

    assert asyncio.run(main()) == [[1]]


def test_prompts_of_pictures_fit_into_the_body_that_a_server_takes() -> None:
    """A picture's id is three times as long as one of text."""
    sampling = asdict(Sampling())
    asked: list[Any] = []
    for place in range(1100):
        ids = [7, *range(BEGIN + (place << 16), BEGIN + (place << 16) + 1000), *range(20)]
        request = {"ids": ids, "sampling": sampling, "key": [place], "pictures": ["a" * 64]}
        asked.append((request, place, None))
    batches: Any = list(_batches(asked))
    assert [place for batch in batches for _, place, _ in batch] == list(range(1100))
    assert len(batches) == 4
    for batch in batches:
        body = {"requests": [request for request, _, _ in batch]}
        posted = httpx.Request("POST", f"{URL}/engine/stream", json=body)
        assert len(posted.content) < MAX_BODY

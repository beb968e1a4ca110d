"""Servers: what becomes of a call whose caller is cancelled, or whose server has ended."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from trireme.ext.remote.servers import ServerLost, Servers

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

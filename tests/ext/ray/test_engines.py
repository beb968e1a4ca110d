"""Engines on Ray: what trainer and explorer do when one is lost and comes back elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from tests.limits import HANG_S

pytest.importorskip("ray")

from tests.ext.http.made import on_port, torch_rollouts, until
from tests.ext.remote.test_engine import PROMPT, SHORT, weights_of
from trireme.ext.http import INSTANCE
from trireme.ext.ray.actors import ExplorerWorker, TrainerWorker
from trireme.ext.ray.engines import ServersOfSides
from trireme.ext.remote import engine_host
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import EngineKeeper
from trireme.ext.remote.servers import Servers
from trireme.launch.explorer_side import ExplorerSide
from trireme.launch.trainer_side import TrainerSide


def test_an_engine_elsewhere_is_asked_again_once_the_trainer_has_given_it_weights(
    tiny_dir: Path,
) -> None:
    """The first machine is lost without a word: connections to it stay open, and it is silent."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            old = await stack.enter_async_context(torch_rollouts(tiny_dir))
            new = await stack.enter_async_context(torch_rollouts(tiny_dir))
            old_url = await stack.enter_async_context(on_port(old))
            new_url = await stack.enter_async_context(on_port(new))
            trainer, explorer = RemoteEngine([old_url]), RemoteEngine([old_url])
            for engine in (trainer, explorer):
                stack.push_async_callback(engine.close)
                engine.servers.restarted = True
                await engine.connect()
            await trainer.update_weights(weights := weights_of(old, 0.05), 3)
            may_push = asyncio.Event()

            async def renew(lacking: Callable[[], bool]) -> None:
                await may_push.wait()
                assert lacking()
                await trainer.servers.persist(lambda: trainer.update_weights(weights, 4))

            trainer.servers.renew = renew
            sides = ServersOfSides(trainer.servers, explorer.servers)
            keeping = asyncio.ensure_future(sides.keep_complete())
            await old.engine.pause()
            call = asyncio.ensure_future(explorer.generate(PROMPT, SHORT, key=(1, 0, 0, 0)))
            push = asyncio.ensure_future(trainer.servers.persist(trainer.fingerprint))
            await until(lambda: old.engine.health().waiting == 1)
            loss = asyncio.ensure_future(sides.loss(old_url))
            await sides.lose(old_url)
            assert "is gone" in str(await asyncio.wait_for(loss, HANG_S))
            await sides.again(0, new_url)
            assert trainer.urls == explorer.urls == (new_url,)
            await asyncio.wait_for(push, HANG_S)
            assert explorer.servers.bare == {new_url} and not call.done()
            may_push.set()
            (reply,) = await asyncio.wait_for(call, HANG_S)
            assert set(reply.versions) == {4} and not explorer.servers.bare
            # a late report of the old one changes nothing
            explorer.servers.lost(old_url, explorer.servers.instances[old_url], "is gone")
            assert not explorer.servers.gone
            keeping.cancel()

    asyncio.run(main())


class Moving:
    """An engine that is elsewhere each time it is started."""

    name = "engine_0"

    def __init__(self, *urls: str) -> None:
        self.urls, self.starts, self.died = urls, 0, asyncio.Event()

    @property
    def url(self) -> str:
        return self.urls[self.starts]

    def start(self) -> None:
        self.starts += 1
        self.died.clear()

    async def ready(self) -> str:
        return self.url

    async def examine(self) -> None:
        pass

    async def watch(self) -> None:
        await self.died.wait()
        raise RuntimeError(f"engine_0 has died at {self.url}")

    async def stop(self, grace: float) -> None:
        pass


def servers_of(url: str, stack: AsyncExitStack, *, silent: str = "") -> Servers:
    """Those of a side that has a server at `url`; one that is `silent` it never reaches."""

    def reply(request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host == silent:
            return httpx.Response(500, json={"error": {"message": "it is dying"}})
        return httpx.Response(200, json={"multi_turn": False}, headers={INSTANCE: f"at {host}"})

    client = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    stack.push_async_callback(client.aclose)
    servers = Servers([url], client, None)
    servers.restarted = True
    return servers


@pytest.mark.parametrize("unreached", ["trainer", "explorer"])
def test_an_engine_that_dies_again_before_one_side_has_reached_it_is_not_lost_to_that_side(
    unreached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_host, "DYING_S", 0.0)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            trainer, explorer = (
                servers_of("http://a", stack, silent="b" if side == unreached else "")
                for side in ("trainer", "explorer")
            )
            for servers in (trainer, explorer):
                await servers.connect()
            engine = Moving("http://a", "http://b", "http://c")

            async def work() -> None:
                engine.died.set()
                await until(lambda: trainer.urls == explorer.urls == ("http://c",))
                assert await trainer.ready() == await explorer.ready() == ["http://c"]
                assert not trainer.gone and not explorer.gone

            keeper = EngineKeeper([engine], ServersOfSides(trainer, explorer), restarts=2)
            await asyncio.wait_for(keeper.run(work()), HANG_S)
            assert engine.starts == 2

    asyncio.run(main())


def test_an_engine_that_is_made_anew_while_others_commit_has_no_weights_yet() -> None:
    async def main() -> None:
        committed, restarted = asyncio.Event(), asyncio.Event()

        async def reply(request: httpx.Request) -> httpx.Response:
            host = request.url.host
            if request.url.path == "/engine/weights/commit":
                committed.set()
                if host == "b":
                    await restarted.wait()
            facts = {"multi_turn": False, "version": 1}
            return httpx.Response(200, json=facts, headers={INSTANCE: f"at {host}"})

        engine = RemoteEngine(["http://a", "http://b"])
        await engine._client.aclose()
        engine._client = httpx.AsyncClient(transport=httpx.MockTransport(reply))
        engine.servers = Servers(engine.urls, engine._client, None)
        engine.servers.restarted = True
        commit = asyncio.ensure_future(engine.commit_weights(1))
        await committed.wait()
        await asyncio.sleep(0.05)  # a has answered, and dies
        await engine.servers.lose("http://a")
        await engine.servers.again(0, "http://c")
        restarted.set()
        await asyncio.wait_for(commit, HANG_S)
        assert engine.servers.bare == {"http://c"}
        assert await engine.servers.ready() == ["http://b"]
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("side", [TrainerSide, ExplorerSide, TrainerWorker, ExplorerWorker])
def test_no_method_of_a_side_has_the_name_of_one_of_its_servers(side: type) -> None:
    """A call to a side's actor names a method alone: see SideWorker.method."""
    assert not {name for name in set(dir(side)) & set(dir(Servers)) if not name.startswith("_")}

"""Engines on Ray: what trainer and explorer do when one is lost and comes back elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.server.made import on_port, torch_rollouts, until
from tests.server.test_remote import PROMPT, SHORT, weights_of
from trireme.engines.remote import RemoteEngine
from trireme.engines.servers import Servers
from trireme.launch.ray.actors import ExplorerWorker, TrainerWorker
from trireme.launch.ray.engines import Sides
from trireme.launch.sides import ExplorerSide, TrainerSide


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
            sides = Sides(trainer.servers, explorer.servers)
            keeping = asyncio.ensure_future(sides.keep_complete())
            await old.engine.pause()
            call = asyncio.ensure_future(explorer.generate(PROMPT, SHORT, key=(1, 0, 0, 0)))
            push = asyncio.ensure_future(trainer.servers.persist(trainer.fingerprint))
            await until(lambda: old.engine.health().waiting == 1)
            loss = asyncio.ensure_future(sides.loss(old_url))
            await sides.lose(old_url)
            assert "is gone" in str(await asyncio.wait_for(loss, 10))
            await sides.again(old_url, new_url)
            assert trainer.urls == explorer.urls == (new_url,)
            await asyncio.wait_for(push, 10)
            assert explorer.servers.bare == {new_url} and not call.done()
            may_push.set()
            (reply,) = await asyncio.wait_for(call, 20)
            assert set(reply.versions) == {4} and not explorer.servers.bare
            # a late report of the old one changes nothing
            explorer.servers.lost(old_url, explorer.servers.instances[old_url], "is gone")
            assert not explorer.servers.gone
            keeping.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("side", [TrainerSide, ExplorerSide, TrainerWorker, ExplorerWorker])
def test_no_method_of_a_side_has_the_name_of_one_of_its_servers(side: type) -> None:
    """A call to a side's actor names a method alone: see SideWorker.method."""
    assert not {name for name in set(dir(side)) & set(dir(Servers)) if not name.startswith("_")}

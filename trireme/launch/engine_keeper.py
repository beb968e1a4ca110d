"""Engine keeper: starts an engine process again that has died, while a run goes on.

- An engine is started again at its old address, at most `cluster.engine_restarts` times; then its
  end is the run's.
- It generates only when it has the run's weights, by the run's own way of sync with its proofs.
- What was under way there is asked for again, see engines/servers.py: no rollout is lost by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from trireme.engines.servers import Servers
from trireme.launch.engine_host import EngineHost
from trireme.log import get_logger

logger = get_logger("launcher")

DYING_S = 0.5
"""Who asks a dying process hears of it before its end can be seen."""
T = TypeVar("T")


class EngineKeeper:
    """Over all engines of a run."""

    def __init__(
        self,
        hosts: Sequence[EngineHost],
        servers: Servers,
        *,
        restarts: int,
    ) -> None:
        self._hosts = hosts
        self._servers = servers
        self._restarts = restarts
        servers.restarted = restarts > 0

    async def run(self, work: Awaitable[T]) -> T:
        """The result of `work`; an engine that is gone for good cancels it: its error is raised."""
        task = asyncio.ensure_future(work)
        keepers = [asyncio.ensure_future(self._keep(host)) for host in self._hosts]
        keepers.append(asyncio.ensure_future(self._servers.keep_complete()))
        try:
            await asyncio.wait({task, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or task.exception() is not None:
                await asyncio.sleep(DYING_S)
                for host in self._hosts:  # the cause, where the work failed for want of an engine
                    if not self._servers.restarted:
                        host.examine()
                for keeper in keepers:
                    if keeper.done():
                        keeper.result()
            return await task
        finally:
            for one in (task, *keepers):
                one.cancel()
            await asyncio.gather(task, *keepers, return_exceptions=True)

    async def _keep(self, host: EngineHost) -> None:
        """Start it again whenever it ends. Raises RuntimeError where that was often enough."""
        for done in range(self._restarts + 1):
            end = await self._end_of(host, again=done > 0)
            what, _, rest = str(end).partition("; ")
            if done == self._restarts:
                limit = f", and cluster.engine_restarts ({done}) is used up" if done else ""
                raise RuntimeError(f"{what}{limit}; {rest}" if rest else what + limit) from end
            logger.warning("%s: it is started again (%d of %d)", what, done + 1, self._restarts)
            self._servers.lost(host.url, self._servers.instances.get(host.url), "is gone")

    async def _end_of(self, host: EngineHost, *, again: bool) -> Exception:
        """Start it `again`; why it cannot go on, by our own looks or by those who asked it."""
        watches: list[asyncio.Future[Any]] = []
        try:
            if again:
                await host.stop(grace=0)
                host.start()
                await host.ready()
                await self._servers.again(host.url)
            looks = asyncio.ensure_future(host.watch())
            loss = asyncio.ensure_future(self._servers.loss(host.url))
            watches = [looks, loss]
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            if looks.done():
                looks.result()
            await asyncio.sleep(DYING_S)
            host.examine()
            return RuntimeError(f"{host.name}: {loss.result()}")
        except (RuntimeError, TimeoutError) as error:
            return error
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

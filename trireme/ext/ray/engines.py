"""Engines on Ray: each runs in an actor, which is replaced wherever there is a place when it has
died.

`EngineKeeper` decides when and how often, as on one machine. The new actor's server has another
address, which is sent to trainer and explorer: the trainer pushes and verifies the run's weights,
and the explorer uses it once it has them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress

import ray
from ray.exceptions import RayError

from trireme.aio import GRACE_S, first_failure, running
from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.config.engine_kind import kind_of
from trireme.ext.ray.cluster import JOIN_S
from trireme.ext.ray.remote import Watched, Worker, remote, watch
from trireme.ext.remote.engine_host import EngineHost, engine_plugins
from trireme.ext.remote.servers import Servers
from trireme.launch.engines import engine_spec
from trireme.workflows.plugins import load_plugins


class EngineWorker(Worker):
    """One engine host; Ray gives this process, and so its child, the engine's GPUs."""

    def __init__(self) -> None:
        self._host: EngineHost | None = None
        self._watch: asyncio.Task[None] | None = None

    async def open(self, plan: Plan, model_path: str, index: int) -> str:
        """Return its address, once it serves. Raises the engine's error, or TimeoutError."""
        if kind_of(plan.engine.kind) is None:
            load_plugins(plan.config.plugins)
        host = EngineHost(
            engine_spec(plan, model_path),
            name=f"engine_{index}",
            log_file=JobFolder(plan.job_dir, plan.explorer_name).log / f"engine_{index}.log",
            python=plan.engine.python or sys.executable,
            host=ray.util.get_node_ip_address(),
            key=plan.engine.key,
            threads=None if plan.device == "cuda" else plan.places.engine_size,
            plugins=engine_plugins(plan),
        )
        host.start()
        self._host = host  # set now: a heartbeat may arrive at any moment
        url = await host.ready(plan.config.cluster.start_timeout)
        self._watch = asyncio.create_task(host.watch())
        return url

    async def health(self) -> None:
        """Raise RuntimeError if the engine has ended, has failed or is silent."""
        if self._host is not None:
            await self._host.examine()
        if self._watch is not None and self._watch.done():
            self._watch.result()

    async def kill(self) -> None:
        """End the engine by force."""
        await self._end(grace=0)

    async def stop(self) -> None:
        """End the engine, by force if necessary."""
        await self._end()

    async def _end(self, **grace: float) -> None:
        host, self._host = self._host, None
        if self._watch is not None:
            self._watch.cancel()
        if host is not None:
            await host.stop(**grace)


class EngineActor:
    """The actor of one engine, and its replacements."""

    def __init__(self, watched: Watched, index: int, make: Callable[[], Watched]) -> None:
        """`make()` starts an actor for it, at its place in the cluster."""
        self.name = watched.name
        self.watched = watched
        self._index = index
        self._make = make
        self._plan: Plan | None = None
        self._model_path = self._url = ""

    @property
    def url(self) -> str:
        """Return the address of the engine's server, once it serves."""
        assert self._url, f"{self.name} does not serve yet"
        return self._url

    async def open(self, plan: Plan, model_path: str) -> str:
        """Return its address, once it serves; later calls return the same."""
        self._plan, self._model_path = plan, model_path
        worker = remote(EngineWorker, self.watched.handle)
        self._url = await worker.open(plan, model_path, self._index)
        return self._url

    def start(self) -> None:
        """Create the actor."""
        self.watched = self._make()

    async def ready(self) -> str:
        """Wait until the engine serves, and return its address. Raises TimeoutError if the cluster
        has no place for it.
        """
        assert self._plan is not None, f"{self.name} was not opened"
        limit = min(self._plan.config.cluster.start_timeout, JOIN_S)
        try:
            await asyncio.wait_for(self.watched.meet(), limit)
            return await self.open(self._plan, self._model_path)
        except TimeoutError as error:
            if self.watched.pid:
                raise
            raise TimeoutError(
                f"{self.name}: the cluster has had no free place for it for {limit:g} s"
            ) from error
        except RayError as error:
            await self.examine()
            raise RuntimeError(f"{self.name} cannot start: {error}") from error

    async def examine(self) -> None:
        """Raise RuntimeError if the actor has ended."""
        assert self._plan is not None, f"{self.name} was not opened"
        await self.watched.beat(self._plan.config.cluster.heartbeat_timeout)

    async def watch(self) -> None:
        """Wait until the actor ends; then raise RuntimeError."""
        assert self._plan is not None, f"{self.name} was not opened"
        await watch([self.watched], self._plan.config.cluster.heartbeat_timeout)

    async def stop(self, grace: float) -> None:
        """Stop the worker; one that does not answer is killed by Ray."""
        with suppress(RayError, TimeoutError):
            kill = remote(EngineWorker, self.watched.handle).kill()
            await asyncio.wait_for(kill, max(grace, GRACE_S))
        ray.kill(self.watched.handle, no_restart=True)


class ServersOfSides:
    """The `Servers` of all sides of a run, each in its own process, as the keeper knows them."""

    def __init__(self, renews: Servers, *others: Servers) -> None:
        """`renews` pushes weights to the engines; the others only call them."""
        self._renews = renews
        self._others = others

    async def lose(self, url: str) -> None:
        """Report to every side that the server at `url` has ended."""
        await asyncio.gather(*(side.lose(url) for side in (self._renews, *self._others)))

    async def loss(self, url: str) -> RuntimeError:
        """Wait for the first side that can say why `url` cannot be used, and return its error."""
        async with running(*(side.loss(url) for side in (self._renews, *self._others))) as losses:
            done, _ = await asyncio.wait(losses, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()

    async def again(self, index: int, new_url: str) -> None:
        """Report the new address of an engine to every side; those that wait for its weights get it
        first.
        """
        for servers in (*self._others, self._renews):
            await servers.again(index, new_url)

    async def hold_devices(self) -> None:
        """Keep the trainer off devices that it shares with the engines: its own side knows them."""
        await self._renews.hold_devices()

    async def release_devices(self) -> None:
        """End what `hold_devices` began."""
        await self._renews.release_devices()

    async def keep_complete(self) -> None:
        """Push the run's weights to restarted engines, and report to the other sides which engines
        have them.
        """

        async def tell() -> None:
            holding: dict[str, str] = {}
            while True:
                holding = await self._renews.holding(holding)
                await asyncio.gather(*(servers.trust(holding) for servers in self._others))

        await first_failure(self._renews.keep_complete(), tell())

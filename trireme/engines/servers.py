"""Servers: which rollout servers a remote engine has, and which of them may be asked.

- A task's rollouts go to one server, so that they share its prefix cache; which one, the key says.
- A server that is gone, or was started again, has lost its weights, and that ends the engine.
- Unless its launcher starts servers again (`restarted`): then it is `gone` until it answers, `bare`
  until it has the run's weights, and meanwhile others are asked, or the caller waits. Whoever
  starts it bounds that wait.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx

from trireme.log import get_logger

logger = get_logger("engine")

T = TypeVar("T")
WAIT_S = 240.0
"""How long servers may take to be there."""
LOOK_S = 25.0
"""How long a server that is busy may take to answer; that of engine processes is the same."""
Renew = Callable[[Callable[[], bool]], Awaitable[None]]
"""Told by a predicate whether a server still lacks them when its turn comes."""
INSTANCE = "x-trireme-instance"
"""Header of every answer: new with every start of a server."""


class ServerLost(RuntimeError):
    """A server is gone."""


class Servers:
    """Those of one engine, in their order."""

    def __init__(self, urls: Sequence[str], client: httpx.AsyncClient, seed: int | None) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.restarted = False
        """Whether somebody starts them again."""
        self.failure: Exception | None = None
        self.multi_turn = False
        """Whether the servers have a scheduler."""
        self.instances: dict[str, str] = {}
        """Of those that have answered."""
        self.gone: dict[str, RuntimeError] = {}
        self.bare: set[str] = set()
        self.renew: Renew | None = None
        """Brings the run's weights to all; None: there are none beside the model's own."""
        self._restarts = 0
        self._client = client
        self._seed = seed
        self._connecting = asyncio.Lock()
        self._bell = asyncio.Event()

    async def connect(self) -> None:
        """Wait until each has been there. Raises TimeoutError naming the one that was not."""
        async with self._connecting:
            for url in self.urls:
                if url not in self.instances:
                    await self._connect(url)

    async def of(self, key: tuple[Any, ...]) -> str:
        """The server of a key's task; another one, or a wait, while that has no weights."""
        while not (here := [u for u in self.urls if u not in self.gone and u not in self.bare]):
            await self._bell.wait()
        place = zlib.crc32(repr(key[:2]).encode())
        own = self.urls[place % len(self.urls)]
        return own if own in here else here[place % len(here)]

    def judge(self, url: str, response: httpx.Response, version: int) -> None:
        """Raise where an answer is not this server's, or not good."""
        if response.headers.get(INSTANCE, self.instances[url]) != self.instances[url]:
            why = f"was started again: the weights of version {version} are lost there"
            raise self.lost(url, self.instances[url], why)
        if response.status_code != 200:
            kind = ValueError if response.status_code in (400, 422) else RuntimeError
            path = response.url.path
            raise kind(f"{url}{path} ({response.status_code}): {_message(response)}")

    def lost(self, url: str, instance: str | None, why: str) -> RuntimeError:
        """A server does not answer; the error that says so. `instance`: the one that was asked."""
        error = ServerLost(f"the rollout server {url} {why}")
        if not self.restarted:
            self.failure = error
        elif instance == self.instances.get(url):  # not its predecessor, of which one hears late
            self.gone.setdefault(url, error)
            self._ring()
        return error

    async def has_lost(self, url: str, error: Exception) -> bool:
        """Whether `error` is the end of a server that is started again: it, or its engine."""
        if self.restarted and not isinstance(error, ServerLost):
            await self._look(url)
        return self.restarted and (isinstance(error, ServerLost) or url in self.gone)

    async def persist(self, push: Callable[[], Awaitable[T]]) -> T:
        """What a call of all servers comes to; done again if one was gone, when all are there."""
        while True:
            before = self._restarts
            try:
                return await push()
            except Exception as error:
                if not self.restarted:
                    raise
                await asyncio.gather(*(self._look(url) for url in self.urls))
                while self.gone:
                    await self._bell.wait()
                if self._restarts == before:
                    raise
                logger.warning(
                    "%s: it is done again, with the server that was started again", error
                )

    async def loss(self, url: str) -> RuntimeError:
        """Why a server is gone, once it is."""
        while url not in self.gone:
            await self._bell.wait()
        return self.gone[url]

    async def again(self, url: str) -> None:
        """A server was started again: it answers, and has none of the run's weights."""
        await self._connect(url)
        self.bare.add(url)
        self._restarts += 1
        self.gone.pop(url, None)
        self._ring()

    async def keep_complete(self) -> None:
        """Bring the run's weights to servers that lack them, again and again. Never returns."""
        while True:
            while not self.bare:
                await self._bell.wait()
            if self.renew is not None:
                await self.renew(lambda: bool(self.bare))
            self.complete()

    def complete(self) -> None:
        """All servers that are there have the run's weights."""
        self.bare.clear()
        self._ring()

    def _ring(self) -> None:
        """Wake all that wait for a change."""
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    async def _look(self, url: str) -> None:
        """Find out whether a server is well."""
        instance = self.instances.get(url)
        try:
            found = await self._client.get(f"{url}/health", timeout=LOOK_S)
        except httpx.TransportError as error:
            self.lost(url, instance, f"is gone: {error or type(error).__name__}")
            return
        if found.status_code != 200:
            self.lost(url, instance, f"has failed: {_message(found)}")

    async def _connect(self, url: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                response = await self._client.get(f"{url}/engine/health", timeout=LOOK_S)
                found = response.json()
                break
            except (httpx.TransportError, ValueError) as error:
                odd = isinstance(error, httpx.UnsupportedProtocol)
                if odd or time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the rollout server {url} (explorer.rollout_model.base_urls) did not "
                        f"answer{'' if odd else f' in {WAIT_S:g} s'}: "
                        f"{error or type(error).__name__}"
                    ) from error
                await asyncio.sleep(0.5)
        if response.status_code != 200 or INSTANCE not in response.headers:
            raise RuntimeError(
                f"{url} is no rollout server of ours, or refuses us: {_message(response)}"
            )
        self.instances[url] = response.headers[INSTANCE]
        self.multi_turn = found["multi_turn"]
        if self._seed is not None and found["seed"] != self._seed:
            logger.warning(
                "%s samples with seed %s and the run has %s: other samples than in one process",
                url,
                found["seed"],
                self._seed,
            )


def _message(response: httpx.Response) -> str:
    """What an answer says is wrong."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]

"""Servers: knows a remote engine's rollout servers, and sends requests to them.

- A rollout's requests go to one server, and its task's to the same, so that they share its prefix
  cache; a new task goes to the server with the least load, and so does a request whose own server
  has far more load than the mean (`Router`).
- A server that is gone, or was restarted, has lost its weights, and that ends the engine.
- Unless its launcher restarts servers (`restarted`): then it is `gone` until it answers, `bare`
  until it has the run's weights, and meanwhile others serve its requests, or the caller waits. The
  launcher bounds that wait. If a launcher spreads the parts, a restarted server may have another
  address, and trainer and explorer each have their own `Servers`.
- `RequestBatcher` sends simultaneous generations in one request, or in as few as possible. The
  answers are lines, each sent when its generation has ended. A cancelled caller cancels its
  generation at the server; the others continue.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from trireme.aio import running
from trireme.engines.engine import MOST_SAMPLES, OnToken
from trireme.ext.http import INSTANCE
from trireme.log import get_logger
from trireme.pictures import BEGIN

if TYPE_CHECKING:
    from trireme.engines.device import ColocationLock

GATHER_S = 0.002
"""Seconds that a request waits for others to join it."""
MOST_TOKENS = 2**20
"""Limit of the prompt tokens in one request: about 7 MiB of JSON; a server accepts twice as many
values."""
PICTURE_WEIGHT = 3
"""A picture's token counts as this many: its id has 19 digits, and takes 20 bytes of JSON."""

Asked = list[tuple[dict[str, Any], asyncio.Future[Any], OnToken | None]]


class RequestBatcher:
    """Sends the generations for one server together."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        check: Callable[[httpx.Response], None],
        *,
        timeout: float,
    ) -> None:
        """`check` raises if a response's head reports an error. `timeout`: seconds that a server
        may take for the next part of its answer.
        """
        self._client = client
        self._timeout = httpx.Timeout(timeout, connect=client.timeout.connect)
        self._url = url
        self._check = check
        self._waiting: Asked = []
        self._work: set[asyncio.Task[None]] = set()

    async def ask(self, request: dict[str, Any], on_token: OnToken | None = None) -> Any:
        """Return the completions of one generation; None if it was aborted at the server.

        Raises httpx.TransportError if the server is gone, ValueError and RuntimeError with the
        server's sentence.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if on_token is not None:
            request = {**request, "tokens": True}
        self._waiting.append((request, answer, on_token))
        if len(self._waiting) == 1:
            self._background(self._send())
        return await answer

    async def close(self) -> None:
        """Abandon all pending requests."""
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    async def _send(self) -> None:
        await asyncio.sleep(GATHER_S)
        waiting, self._waiting = self._waiting, []
        # the server would not know yet what to cancel of one whose caller has gone meanwhile
        waiting = [asked for asked in waiting if not asked[1].done()]
        for batch in _batches(waiting):
            self._background(self._post(batch))

    async def _post(self, batch: Asked) -> None:
        name = secrets.token_hex(8)
        for index, (_, answer, _) in enumerate(batch):
            answer.add_done_callback(lambda done, index=index: self._gone(done, name, index))
        body = {"id": name, "requests": [request for request, _, _ in batch]}
        failure: BaseException = httpx.ReadError("the server ended its answer early")
        try:
            async with self._client.stream(
                "POST", f"{self._url}/engine/stream", json=body, timeout=self._timeout
            ) as got:
                if got.status_code != 200:
                    await got.aread()
                self._check(got)
                async for line in got.aiter_lines():
                    event = json.loads(line)
                    _, answer, on_token = batch[event["index"]]
                    if "token" not in event:
                        _settle(answer, event)
                    elif on_token is not None and not answer.done():
                        sample, token, logprob, others = event["token"]
                        on_token(sample, token, logprob, {int(k): v for k, v in others.items()})
        except asyncio.CancelledError:
            failure = asyncio.CancelledError()
            raise
        except Exception as error:  # every caller gets it
            failure = error
        finally:
            for _, answer, _ in batch:
                if answer.done():
                    continue
                if isinstance(failure, asyncio.CancelledError):
                    answer.cancel()
                else:
                    answer.set_exception(failure)

    def _gone(self, answer: asyncio.Future[Any], name: str, index: int) -> None:
        """Cancel a generation at the server when its caller has been cancelled."""
        if answer.cancelled() and not self._client.is_closed:
            self._background(self._cancel(name, index))

    async def _cancel(self, name: str, index: int) -> None:
        body = {"id": name, "index": index}
        try:
            await self._client.post(f"{self._url}/engine/cancel", json=body, timeout=10)
        except (httpx.TransportError, RuntimeError):
            return  # the server is gone, or this client is: nothing is left to cancel

    def _background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


def _batches(waiting: Asked) -> Iterator[Asked]:
    batch: Asked = []
    samples = tokens = 0
    for asked in waiting:
        request = asked[0]
        n, length = request["sampling"]["n"], _weight(request)
        if batch and (samples + n > MOST_SAMPLES or tokens + length > MOST_TOKENS):
            yield batch
            batch, samples, tokens = [], 0, 0
        batch.append(asked)
        samples, tokens = samples + n, tokens + length
    if batch:
        yield batch


def _weight(request: Mapping[str, Any]) -> int:
    """Return how many tokens of text take as many bytes as the prompt of a request."""
    ids = request["ids"]
    if not request.get("pictures"):
        return len(ids)
    return len(ids) + (PICTURE_WEIGHT - 1) * sum(token >= BEGIN for token in ids)


def _settle(answer: asyncio.Future[Any], reply: dict[str, Any]) -> None:
    if answer.done():
        return
    if "error" in reply:
        kind = ValueError if reply["status"] == 400 else RuntimeError
        answer.set_exception(kind(reply["error"]))
    else:
        answer.set_result(reply.get("completions"))


logger = get_logger("engine")

T = TypeVar("T")
WAIT_S, NOTED_S = 240.0, 5.0
"""Seconds that servers may take to come up, and after which a line names the one waited for."""
LOOK_S = 25.0
"""Seconds that a busy server may take to answer; the same for engine processes."""
Renew = Callable[[Callable[[], bool]], Awaitable[None]]
"""A callback that pushes the weights again if a server still lacks them."""
Ready = Callable[[], Awaitable[Sequence[str]]]
SPILL = 1.2
"""A server may owe this multiple of the mean before its cached requests go elsewhere."""
FIRST_REPLY = 256.0
"""Assumed tokens of a reply before any is finished."""
RECENT_REPLIES = 256
"""The number of replies in their running mean length, about."""
MOST_CACHED = 2**17
"""Tasks and rollouts whose server is remembered."""


class Router:
    """Chooses servers by their prefix caches, then by the tokens that they still owe.

    A request counts as its prompt's tokens plus replies of the mean length so far.
    """

    def __init__(self) -> None:
        self.owed: dict[str, float] = {}
        """Tokens of running requests, by server."""
        self._given: dict[str, float] = {}
        """Tokens of all requests so far, by server: among servers that owe the same, the one with
        fewer is chosen."""
        self._choosing = 0.0
        """Tokens of requests that have no server yet."""
        self._cached: OrderedDict[tuple[Any, ...], str] = OrderedDict()
        """The last server of each recently used task or rollout."""
        self._reply = FIRST_REPLY

    @asynccontextmanager
    async def place(
        self, key: tuple[Any, ...], *, prompt: int, samples: int, ready: Ready
    ) -> AsyncIterator[str]:
        """Choose the server of one request; its tokens are owed inside the block. `ready()` waits
        for servers that can be called, and names them.
        """
        tokens = prompt + samples * self._reply
        servers = await ready()
        if len(servers) > 1:
            self._choosing += tokens
            try:
                await asyncio.sleep(GATHER_S)  # simultaneous requests count in the mean
                servers = await ready()
            finally:
                self._choosing -= tokens
        url = self._choose(key, tokens, servers)
        self.owed[url] = self.owed.get(url, 0.0) + tokens
        try:
            yield url
        finally:
            self.owed[url] -= tokens

    def replied(self, lengths: Sequence[int]) -> None:
        """Record the lengths of replies."""
        for length in lengths:
            self._reply += (length - self._reply) / RECENT_REPLIES

    def _choose(self, key: tuple[Any, ...], tokens: float, servers: Sequence[str]) -> str:
        owed = {url: self.owed.get(url, 0.0) for url in servers}
        least = min(servers, key=lambda url: (owed[url], self._given.get(url, 0.0)))
        names = (key[:3], key[:2]) if key else ()  # the rollout and the task
        cached = [self._cached[name] for name in names if self._cached.get(name) in owed]
        chosen = cached[0] if cached else least
        mean = (sum(owed.values()) + self._choosing + tokens) / len(servers)
        if owed[chosen] > SPILL * mean:
            chosen = least
        self._given[chosen] = self._given.get(chosen, 0.0) + tokens
        for name in names:
            if name == key[:3] or self._cached.get(name) not in owed:  # a task stays on its server
                self._cached[name] = chosen
            self._cached.move_to_end(name)
        while len(self._cached) > MOST_CACHED:
            self._cached.popitem(last=False)
        return chosen


class ServerLost(RuntimeError):
    """A server is gone."""


class Silent(httpx.TimeoutException):
    """A server answers neither a long call nor anything else."""


class Servers:
    """The servers of one engine, in their order."""

    def __init__(self, urls: Sequence[str], client: httpx.AsyncClient, seed: int | None) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.restarted = False
        """True if the launcher restarts servers that end."""
        self.failure: Exception | None = None
        self.multi_turn = False
        """True if the servers have a scheduler."""
        self.instances: dict[str, str] = {}
        """Instance ids of the servers that have answered."""
        self.gone: dict[str, RuntimeError] = {}
        self.bare: set[str] = set()
        self.renew: Renew | None = None
        """Pushes the run's weights to all servers; None: they serve only the model's own."""
        self.colocation: ColocationLock | None = None
        self.router = Router()
        self._restarts = 0
        self._ends: dict[str, set[asyncio.Future[RuntimeError]]] = {}
        """Futures of each server's pending calls: set when the server has ended."""
        self._client = client
        self._seed = seed
        self._connecting = asyncio.Lock()
        self._changed = asyncio.Event()

    async def connect(self) -> None:
        """Wait until each has been up once. Raises TimeoutError that names the missing one."""
        async with self._connecting:
            for url in self.urls:
                if url not in self.instances:
                    await self._connect(url)

    async def ready(self) -> list[str]:
        """Wait for servers that are up and have the run's weights, and return them."""
        while not (here := [u for u in self.urls if u not in self.gone and u not in self.bare]):
            await self._changed.wait()
        return here

    def judge(self, url: str, response: httpx.Response, version: int) -> None:
        """Raise if an answer comes from a restarted server, or reports an error."""
        if response.headers.get(INSTANCE, self.instances[url]) != self.instances[url]:
            why = f"was restarted, and has lost the weights of version {version}"
            raise self.lost(url, self.instances[url], why)
        if response.status_code != 200:
            kind = ValueError if response.status_code in (400, 422) else RuntimeError
            path = response.url.path
            raise kind(f"{url}{path} ({response.status_code}): {_message(response)}")

    def lost(self, url: str, instance: str | None, why: str) -> RuntimeError:
        """Record that a server does not answer, and return the error. `instance`: the one that was
        called.
        """
        error = ServerLost(f"the rollout server {url} {why}")
        if not self.restarted:
            self.failure = error
        elif url in self.urls and instance == self.instances.get(url):
            # an error of the previous instance may arrive late
            self.gone.setdefault(url, error)
            self._wake()
        return error

    async def has_lost(self, url: str, error: Exception) -> bool:
        """Return whether `error` means the end of a restarted server or of its engine."""
        if self.restarted and not isinstance(error, ServerLost):
            await self._look(url)
        return self.restarted and (isinstance(error, ServerLost) or url in self.gone)

    async def persist(self, push: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call of all servers; retry, once all are up, if one was gone."""
        while True:
            before = self._restarts
            try:
                return await push()
            except Exception as error:
                if not self.restarted:
                    raise
                await asyncio.gather(*(self._look(url) for url in self.urls))
                while self.gone:
                    await self._changed.wait()
                if self._restarts == before:
                    raise
                logger.warning("%s: the call is repeated with the restarted server", error)

    async def answer(self, url: str, call: Awaitable[T], *, silence: float | None = None) -> T:
        """Return the result of a call of a server. Raises ServerLost if its end is reported first:
        a lost machine closes no connection. Raises Silent if meanwhile it does not even answer
        /health for `silence` seconds, as one that only works on a long call does.
        """
        end: asyncio.Future[RuntimeError] = asyncio.get_running_loop().create_future()
        ends = self._ends.setdefault(url, set())
        ends.add(end)
        try:
            watch = [] if silence is None else [self._watch(url, silence)]
            async with running(call, *watch) as (asking, *watching):
                await asyncio.wait({asking, end, *watching}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
                if end.done():
                    raise end.result()
                raise Silent("the server answers nothing")
        finally:
            ends.discard(end)

    async def hold_devices(self) -> None:
        """Keep a trainer off devices that it shares with the servers, until `release_devices`."""
        if self.colocation is not None:
            await self.colocation.hold()

    async def release_devices(self) -> None:
        """End what `hold_devices` began."""
        if self.colocation is not None:
            self.colocation.release()

    async def lose(self, url: str) -> None:
        """Record the launcher's report that a server has ended: it answers no more."""
        error = self.lost(url, self.instances.get(url), "is gone")
        for end in self._ends.pop(url, ()):
            end.set_result(error)

    async def loss(self, url: str) -> RuntimeError:
        """Return the reason why a server is gone, if it is."""
        while url not in self.gone:
            await self._changed.wait()
        return self.gone[url]

    async def again(self, index: int, new_url: str) -> None:
        """Record that server `index` was restarted, perhaps elsewhere, and perhaps more than once
        since it was last reached from here: it has none of the run's weights.
        """
        new_url = new_url.rstrip("/")
        await self._connect(new_url)
        url = self.urls[index]
        self.urls = (*self.urls[:index], new_url, *self.urls[index + 1 :])
        self.bare.discard(url)
        self.bare.add(new_url)
        self._restarts += 1
        self.gone.pop(url, None)
        self._wake()

    async def keep_complete(self) -> None:
        """Push the run's weights to servers that lack them, repeatedly. Never returns."""
        while True:
            while not self.bare:
                await self._changed.wait()
            lacking = {url: self.instances[url] for url in self.bare}
            if self.renew is not None:
                await self.renew(lambda: bool(self.bare))
            self.complete(lacking)

    def complete(self, holding: Mapping[str, str]) -> None:
        """Note that these instances have the run's weights. A server that was restarted while they
        got them is another one.
        """
        self.bare -= {url for url in self.bare if self.instances[url] == holding.get(url)}
        self._wake()

    async def holding(self, known: Mapping[str, str]) -> dict[str, str]:
        """Return the instances that have the run's weights, once they differ from those `known`."""
        while True:
            lacking = self.bare | set(self.gone)
            holds = {u: i for u, i in self.instances.items() if u in self.urls and u not in lacking}
            if holds != known:
                return holds
            await self._changed.wait()

    async def trust(self, holding: Mapping[str, str]) -> None:
        """Record that these instances have the run's weights, pushed by another process."""
        self.complete(holding)

    async def _watch(self, url: str, limit: float) -> None:
        """Return once a server has answered nothing for `limit` seconds."""
        patience = min(LOOK_S, limit)
        answered = time.monotonic()
        while time.monotonic() - answered < limit:
            await asyncio.sleep(patience / 4)
            with suppress(httpx.TransportError):
                await self._client.get(f"{url}/health", timeout=patience)
                answered = time.monotonic()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _look(self, url: str) -> None:
        instance = self.instances.get(url)
        try:
            response = await self._client.get(f"{url}/health", timeout=LOOK_S)
        except httpx.TransportError as error:
            self.lost(url, instance, f"is gone: {str(error) or type(error).__name__}")
            return
        if response.status_code != 200:
            self.lost(url, instance, f"has failed: {_message(response)}")

    async def _connect(self, url: str) -> None:
        began, noted = time.monotonic(), False
        while True:
            try:
                response = await self._client.get(f"{url}/engine/health", timeout=LOOK_S)
                facts = response.json()
                break
            except (httpx.TransportError, ValueError) as error:
                odd = isinstance(error, httpx.UnsupportedProtocol)
                waited = time.monotonic() - began
                if not (odd or noted) and waited > NOTED_S:
                    noted = True
                    logger.warning(
                        "the rollout server %s (explorer.rollout_model.base_urls) does not answer "
                        "(%s); the run waits for it, at most %g s: start it with `trireme rollout`",
                        *(url, str(error) or type(error).__name__, WAIT_S),
                    )
                if odd or waited > WAIT_S:
                    raise TimeoutError(
                        f"the rollout server {url} (explorer.rollout_model.base_urls) did not "
                        f"answer{'' if odd else f' in {WAIT_S:g} s'}: "
                        f"{str(error) or type(error).__name__}"
                    ) from error
                await asyncio.sleep(0.5)
        if response.status_code != 200 or INSTANCE not in response.headers:
            raise RuntimeError(
                f"{url} is not a rollout server of Trireme's, or refuses access: "
                f"{_message(response)}"
            )
        self.instances[url] = response.headers[INSTANCE]
        self.multi_turn = facts["multi_turn"]
        if self._seed is not None and facts["seed"] != self._seed:
            logger.warning(
                "%s samples with seed %s, and the run's seed is %s: its samples differ from "
                "those of a run in one process",
                url,
                facts["seed"],
                self._seed,
            )


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]

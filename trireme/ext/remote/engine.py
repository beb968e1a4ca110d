"""Remote: an engine that runs in other processes, behind one or several rollout servers.

- `Servers` chooses the server of a request, and handles the loss of one. A generation that was
  running there is requested again if its launcher restarts the server.
- New weights go to all servers in buckets, and take effect once all servers have them.
- Every request has a time-out, which for weights and control is not that of a rollout; a failure
  names the server, the request and the limit.
- An aborted request is dropped at once; its server notices and stops. So nothing here waits for a
  lost server.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import save
from torch import Tensor

from trireme.engines.engine import Completion, EngineTraits, Health, OnToken, Sampling, Wakes
from trireme.ext.remote.servers import RequestBatcher, Servers, Silent
from trireme.ext.remote.shelf import UNKNOWN
from trireme.ext.remote.weight_group import buckets
from trireme.pictures import KnownPictures, Picture
from trireme.serialize import array_from_wire, picture_to_wire

BUCKET_BYTES = 256 * 2**20
CONNECT_S = 30.0
"""Seconds that a server may take to accept a connection."""
_OF_ROLLOUTS = ("/engine/stream", "/infer/", "/engine/logprobs", "/engine/pictures")
"""Requests whose time is part of a rollout's."""


class RemoteEngine:
    """An engine behind one or several servers."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        timeout: float = 1800.0,
        sync_timeout: float = 3600.0,
        seed: int | None = None,
    ) -> None:
        """`timeout`: seconds of one generation; `sync_timeout`: of any other request. `seed` is the
        run's: with a server of the same seed the samples equal those of a run in one process.
        """
        self._timeout, self._sync_timeout = timeout, sync_timeout
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # idle connections are closed long before the server does it
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=15.0
        )
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(sync_timeout, connect=CONNECT_S), headers=headers, limits=limits
        )
        self.servers = Servers(urls, self._client, seed)
        # a server whose engine sees nothing refuses pictures itself
        pushes = {"memory": "http", "nccl": "group", "paired": "pairs"}
        self.traits = EngineTraits(pushes, sees=True, members=len(self.urls))
        self.colocation: Wakes | None = None
        """The lock shared with a trainer that uses the same accelerator."""
        self.bucket_bytes = BUCKET_BYTES
        self._sent: dict[str, tuple[str, KnownPictures]] = {}
        """For each server its instance, and the pictures that this instance has received."""
        self._sending: dict[tuple[str, str, str], asyncio.Task[Any]] = {}
        """Pictures on their way, by server, instance and digest."""
        self._version = 0
        self._begun = False
        self._calls: dict[asyncio.Future[Any], tuple[Any, ...]] = {}
        self._generated = self._prefilled = 0
        self._paused = self._closed = False
        self._batchers: dict[str, RequestBatcher] = {}

    async def connect(self) -> None:
        """Wait until all servers are up and awake. Raises TimeoutError that names the
        missing ones.
        """
        await self.servers.connect()
        if self.colocation is not None:
            await self.colocation.for_engine()

    @property
    def multi_turn(self) -> bool:
        """True if the servers have a scheduler."""
        return self.servers.multi_turn

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: tuple[Any, ...] = (),
        on_token: OnToken | None = None,
        pictures: Sequence[Picture] = (),
    ) -> list[Completion]:
        """Generate on the server that the router picks. An aborted request returns no tokens."""
        self._check()
        body: dict[str, Any] = {
            "ids": list(ids),
            "sampling": dataclasses.asdict(sampling),
            "key": list(key),
        }
        if pictures:
            body["pictures"] = [picture.digest for picture in pictures]
        report = None if on_token is None else _without_repeats(on_token)
        size = {"prompt": len(ids), "samples": sampling.n}

        async def ask(url: str) -> Any:
            return await self._showing(url, pictures, lambda: self._generate(url, body, report))

        answers = await self._ask_while(key, ask, **size)
        if answers is None:
            return [Completion([], [], [], [], "aborted") for _ in range(sampling.n)]
        completions = [_completion(c) for c in answers]
        self._prefilled += len(ids)
        self._generated += sum(len(c.ids) for c in completions)
        self.servers.router.replied([len(c.ids) for c in completions])
        # another process may have pushed new weights
        self._version = max([self._version, *(max(c.versions, default=0) for c in completions)])
        return completions

    async def infer(
        self,
        request: Mapping[str, Any],
        sampling: Sampling,
        *,
        key: tuple[Any, ...],
        loss_scale: Any,
    ) -> list[dict[str, Any]]:
        """Return a whole trajectory by the server's scheduler: its outputs, see /infer/."""
        self._check()
        options = dataclasses.asdict(sampling)
        body = {"infer_requests": [dict(request)], "request_config": options, "key": list(key)}
        body["loss_scale"] = loss_scale
        response = await self._ask_while(key, lambda url: self._post(url, "/infer/", body))
        if response is None:
            raise RuntimeError(f"rollout {'/'.join(map(str, key))} was aborted")
        return response

    async def logprobs(
        self,
        ids: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        pictures: Sequence[Picture] = (),
    ) -> list[list[float]]:
        """Return log-probabilities of rows: the first row from the first server, the next one from
        the next.
        """
        self._check()
        await self.connect()
        common: dict[str, Any] = {"temperature": temperature}
        if pictures:
            common["pictures"] = [picture.digest for picture in pictures]

        async def ask(url: str, rows: list[list[int]]) -> list[list[float]]:
            body = common | {"ids": rows}
            return await self._showing(
                url, pictures, lambda: self._post(url, "/engine/logprobs", body)
            )

        rows = [list(row) for row in ids]
        num = min(len(self.urls), len(rows))
        dealt = [(url, rows[first::num]) for first, url in enumerate(self.urls[:num])]
        parts = await self._all(ask(url, mine) for url, mine in dealt)
        return [parts[at % num][at // num] for at in range(len(rows))]

    async def _showing(
        self, url: str, pictures: Sequence[Picture], ask: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Return the answer to a request that shows pictures; those that the server lacks are sent
        before it.
        """
        if not pictures:
            return await ask()
        instance = self.servers.instances[url]
        if self._sent.get(url, ("", None))[0] != instance:
            self._sent[url] = instance, KnownPictures()
        known = self._sent[url][1]
        await self._send(url, known.lacking(pictures), known)
        try:
            return await ask()
        except ValueError as error:
            if UNKNOWN not in str(error):
                raise
        await self._send(url, pictures, known)  # the server has dropped some since
        return await ask()

    async def _send(self, url: str, pictures: Sequence[Picture], known: KnownPictures) -> None:
        """Send pictures, each once for all requests that show it at the same time."""
        for picture in pictures:
            name = url, self.servers.instances[url], picture.digest
            if (sending := self._sending.get(name)) is None:
                post = self._post(url, "/engine/pictures", picture_to_wire(picture))
                sending = self._sending[name] = asyncio.ensure_future(post)
                sending.add_done_callback(partial(self._has_sent, name))
            await asyncio.shield(sending)  # for the others if this request is aborted
            known.add([picture])

    def _has_sent(self, name: tuple[str, str, str], sending: asyncio.Task[Any]) -> None:
        del self._sending[name]
        if not sending.cancelled():
            sending.exception()  # raised to those that wait, of whom none may be left

    async def update_weights(self, source: Any, version: int) -> None:
        """Send weights to all servers. A folder must be readable by the servers."""
        self._check()
        if source is None:
            raise ValueError("a remote engine has its own weights: update_weights needs a source")
        await self.connect()
        if isinstance(source, str | Path):
            await self.commit_weights(version, path=str(Path(source).resolve()))
            return
        for bucket in buckets(source.items(), self.bucket_bytes):
            await self.send_weights(bucket)
        await self.commit_weights(version)

    async def send_weights(self, bucket: Mapping[str, Tensor]) -> None:
        """Send a part of new weights to all servers, which use it once they are asked to commit.

        Works while a trainer has the accelerator as well: the servers only store it.
        """
        data = save({name: tensor.cpu().contiguous() for name, tensor in bucket.items()})
        await self._all(self._post(url, "/engine/weights", data) for url in self.urls)

    async def commit_weights(self, version: int, **source: str) -> None:
        """Load the weights that were sent, or those in `path`."""
        await self.connect()
        body, instances = source | self.as_version(version), dict(self.servers.instances)
        await self._all(self._post(url, "/engine/weights/commit", body) for url in self.urls)
        self.now_at(version, instances)

    async def fingerprint(self) -> dict[str, float] | None:
        """Return the servers' fingerprint. Raises RuntimeError if their weights differ."""
        marks = await self.get_all("/engine/fingerprint")
        for url, other in zip(self.urls[1:], marks[1:], strict=True):
            if other != marks[0]:
                raise RuntimeError(f"{url} has other weights than {self.urls[0]}")
        return marks[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers, in their order."""
        return self.servers.urls

    async def get_all(self, path: str) -> list[Any]:
        """Return every server's answer, in the servers' order."""
        self._check()
        await self.connect()
        calls = (self._ask(url, path, self._client.get(url + path)) for url in self.urls)
        return await self._all(calls)

    async def versions(self) -> list[int]:
        """Return the version of each server's weights; 0: those that it was started with."""
        return [facts["version"] for facts in await self.get_all("/engine/health")]

    async def call_all(self, path: str, *bodies: dict[str, Any], asleep: bool = False) -> list[Any]:
        """POST to every server: a list with each server's own body, or one body (or none) for all.

        `asleep`: also to engines that pause while their trainer works.
        """
        self._check()
        await (self.servers.connect() if asleep else self.connect())
        each_body = bodies if len(bodies) == len(self.urls) else (bodies or ({},)) * len(self.urls)
        pairs = zip(self.urls, each_body, strict=True)
        return await self._all(self._post(url, path, body) for url, body in pairs)

    def as_version(self, version: int) -> dict[str, Any]:
        """Return the version fields of a push; the first push takes servers over from
        another run.
        """
        return {"version": version, "begin": not self._begun}

    def now_at(self, version: int, instances: Mapping[str, str]) -> None:
        """Note that all servers, those `instances`, have loaded new weights."""
        self._begun = True
        self._version = version
        self.servers.complete(instances)

    async def pause(self, *, weights_follow: bool = False) -> None:
        """Pause all servers; new requests wait."""
        await self.servers.connect()
        body = {"weights_follow": weights_follow}
        await self._all(self._post(url, "/engine/pause", body) for url in self.urls)
        self._paused = True

    async def resume(self) -> None:
        """Resume all servers."""
        await self.servers.connect()
        await self._all(self._post(url, "/engine/resume", {}) for url in self.urls)
        self._paused = False

    async def abort(self, key: tuple[Any, ...] = ()) -> int:
        """Abort this client's requests whose key begins with `key`; return their number."""
        mine = [
            c for c, call_key in self._calls.items() if call_key[: len(key)] == key and not c.done()
        ]
        for call in mine:
            call.cancel()
        return len(mine)

    def health(self) -> Health:
        """Return the version and the counts of this client's requests."""
        self._check()
        running, waiting = (0, len(self._calls)) if self._paused else (len(self._calls), 0)
        return Health(
            self._version, running, waiting, self._generated, self._prefilled, 0, self._paused
        )

    async def close(self) -> None:
        """Abort this client's requests and close its connections; the servers keep running."""
        self._closed = True
        await self.abort()
        while self._calls:  # each ends by itself once it is cancelled
            await asyncio.wait(set(self._calls))
            await asyncio.sleep(0)
        for sending in self._sending.values():
            sending.cancel()
        for batcher in self._batchers.values():
            await batcher.close()
        await self._client.aclose()

    def _check(self) -> None:
        if (failure := self.servers.failure) is not None:
            raise RuntimeError(f"the remote engine has failed: {failure}") from failure
        if self._closed:
            raise RuntimeError("the engine is closed")

    async def _ask_while(
        self,
        key: tuple[Any, ...],
        ask_server: Callable[[str], Awaitable[Any]],
        *,
        prompt: int = 0,
        samples: int = 1,
    ) -> Any:
        """Call the server of `key`, again if it was lost; None if the request was aborted."""
        size: dict[str, Any] = {"prompt": prompt, "samples": samples}

        async def ask() -> Any:
            while True:
                await self.connect()
                placed = self.servers.router.place(key, ready=self.servers.ready, **size)
                async with placed as url:
                    try:
                        return await ask_server(url)
                    except RuntimeError as error:
                        if not await self.servers.has_lost(url, error):
                            raise

        call = asyncio.ensure_future(ask())
        self._calls[call] = key
        try:
            await asyncio.wait({call})
            return None if call.cancelled() else call.result()
        finally:
            call.cancel()
            del self._calls[call]

    async def _generate(self, url: str, body: dict[str, Any], restarts: Restarts | None) -> Any:
        if url not in self._batchers:
            self._batchers[url] = RequestBatcher(
                self._client, url, lambda found: self._judge(url, found), timeout=self._timeout
            )
        batcher = self._batchers[url]
        return await self._heard(url, "/engine/stream", batcher.ask(body, restarts and restarts()))

    async def _post(self, url: str, path: str, body: Any) -> Any:
        sent: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            sent = {"content": body, "headers": {"content-type": "application/octet-stream"}}
        sent["timeout"] = httpx.Timeout(self._limit(path)[0], connect=CONNECT_S)
        return await self._ask(url, path, self._client.post(f"{url}{path}", **sent))

    async def _ask(self, url: str, path: str, call: Awaitable[httpx.Response]) -> Any:
        """Return the answer to one request. A request that the server refuses raises ValueError or
        RuntimeError.
        """
        response = await self._heard(url, path, call)
        self._judge(url, response)
        return response.json()

    def _limit(self, path: str) -> tuple[float, str]:
        """Return the seconds that a request may take, and their key in the YAML."""
        if path in _OF_ROLLOUTS:
            return self._timeout, "explorer.max_timeout"
        return self._sync_timeout, "synchronizer.sync_timeout"

    async def _heard(self, url: str, path: str, call: Awaitable[Any]) -> Any:
        """Return the result of a call. A server that does not answer counts as lost: one that is
        silent for longer than a rollout may take, also while it is sent weights.
        """
        instance = self.servers.instances[url]
        seconds, key = self._limit(path)
        silence = self._timeout if seconds > self._timeout else None
        try:
            return await self.servers.answer(url, call, silence=silence)
        except httpx.TransportError as error:
            why = f"is gone ({path}): {str(error) or type(error).__name__}"
            if isinstance(error, Silent):
                why = (
                    f"answered neither {path} nor /health for {silence:g} s (explorer.max_timeout)"
                )
            elif isinstance(error, httpx.TimeoutException):
                if isinstance(error, httpx.ConnectTimeout):
                    why = f"did not accept a connection within {CONNECT_S:g} s ({path})"
                else:
                    why = f"did not answer {path} within {seconds:g} s ({key})"
            raise self.servers.lost(url, instance, why) from error

    def _judge(self, url: str, response: httpx.Response) -> None:
        self.servers.judge(url, response, self._version)

    async def _all(self, calls: Iterator[Coroutine[Any, Any, Any]]) -> list[Any]:
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for one in answers:
            if isinstance(one, BaseException):
                raise one
        return answers


Restarts = Callable[[], OnToken]
"""Makes a token callback for another attempt at a generation."""


def _without_repeats(on_token: OnToken) -> Restarts:
    """Report each token once, even if a lost server has reported some of them already: another
    server samples the same tokens, since a generation has its own random stream.
    """
    reported: Counter[int] = Counter()

    def again() -> OnToken:
        come: Counter[int] = Counter()

        def one(sample: int, token: int, logprob: float, others: dict[int, float]) -> None:
            come[sample] += 1
            if come[sample] > reported[sample]:
                reported[sample] += 1
                on_token(sample, token, logprob, others)

        return one

    return again


def _completion(wire: Mapping[str, Any]) -> Completion:
    rows = wire["alternatives"]
    alternatives = [{int(token): p for token, p in row.items()} for row in rows]
    routing = wire.get("routed_experts")
    routed_experts = None if routing is None else array_from_wire(routing)
    return Completion(**{**wire, "alternatives": alternatives, "routed_experts": routed_experts})

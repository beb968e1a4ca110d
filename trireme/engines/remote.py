"""Remote: an engine in other processes, behind one or several rollout servers.

- A task's rollouts go to one server, so that they share its prefix cache; which one, the key says.
- New weights go to all servers in buckets, and count from when all have them.
- A server that was restarted has lost its weights: it is told by its instance, and the run ends.
- Every request has a time-out; a failure says which server, and what for.
- A request that is aborted is let go of at once; its server sees that and stops. So nothing here
  waits for a server that is gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import save
from torch import Tensor

from trireme.engines.engine import Completion, Health, OnToken, Sampling
from trireme.engines.outbox import Outbox
from trireme.log import get_logger

logger = get_logger("engine")

BUCKET_BYTES = 256 * 2**20
WAIT_S = 240.0
"""How long servers may take to be there."""
INSTANCE = "x-trireme-instance"
"""Header of every answer: new with every start of a server."""


class RemoteEngine:
    """See Engine."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        timeout: float = 1800.0,
        seed: int | None = None,
    ) -> None:
        """`timeout`: seconds of one generation. `seed` is the run's: with a server of the same one
        the samples are those of a run in one process.
        """
        self._urls = [url.rstrip("/") for url in urls]
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # idle connections go long before the server closes them
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=15.0
        )
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout, connect=30.0), headers=headers, limits=limits
        )
        self._seed = seed
        self._instances: dict[str, str] = {}
        self._version = 0
        self._calls: dict[asyncio.Future[Any], tuple[Any, ...]] = {}
        self._generated = self._prefilled = 0
        self._paused = self._closed = False
        self._connecting = asyncio.Lock()
        self._outboxes: dict[str, Outbox] = {}
        self._failure: Exception | None = None
        self.multi_turn = False
        """Whether the servers have a scheduler."""

    async def connect(self) -> None:
        """Wait until all servers are there. Raises TimeoutError naming the one that is not."""
        async with self._connecting:
            for url in self._urls:
                if url not in self._instances:
                    await self._connect(url)

    async def _connect(self, url: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                response = await self._client.get(f"{url}/engine/health", timeout=10)
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
        self._instances[url] = response.headers[INSTANCE]
        self.multi_turn = found["multi_turn"]
        if self._seed is not None and found["seed"] != self._seed:
            logger.warning(
                "%s samples with seed %s and the run has %s: other samples than in one process",
                url,
                found["seed"],
                self._seed,
            )

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: tuple[Any, ...] = (),
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """See Engine. Of an aborted request nothing comes back."""
        self._check()
        body = {"ids": list(ids), "sampling": dataclasses.asdict(sampling), "key": list(key)}
        found = await self._ask_while(key, lambda url: self._generate(url, body))
        if found is None:
            return [Completion([], [], [], [], "aborted") for _ in range(sampling.n)]
        completions = [_completion(c) for c in found]
        self._prefilled += len(ids)
        self._generated += sum(len(c.ids) for c in completions)
        # new weights may have come from another process
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
        """A whole trajectory by the server's scheduler: its outputs, see server/rollouts.py."""
        self._check()
        options = dataclasses.asdict(sampling)
        body = {"infer_requests": [dict(request)], "request_config": options, "key": list(key)}
        body["loss_scale"] = loss_scale
        found = await self._ask_while(key, lambda url: self._post(url, "/infer/", body))
        if found is None:
            raise RuntimeError(f"rollout {key} was aborted")
        return found

    async def logprobs(
        self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[list[float]]:
        """See Engine; asked of the first server, the fingerprints of all."""
        self._check()
        await self.connect()
        rows = {"ids": [list(row) for row in ids], "temperature": temperature}
        return await self._post(self._urls[0], "/engine/logprobs", rows)

    async def update_weights(self, source: Any, version: int) -> None:
        """See Engine. A folder must be readable by the servers."""
        self._check()
        if source is None:
            raise ValueError("a remote engine has its own weights: update_weights needs a source")
        await self.connect()
        if isinstance(source, str | Path):
            body = {"version": version, "path": str(Path(source).resolve())}
        else:
            body = {"version": version}
            for part in _buckets(source):
                data = save(part)
                await self._all(self._post(url, "/engine/weights", data) for url in self._urls)
        await self._all(self._post(url, "/engine/weights/commit", body) for url in self._urls)
        self._version = version

    async def fingerprint(self) -> dict[str, float] | None:
        """See Engine. Raises RuntimeError where the servers have different weights."""
        found = await self.get_all("/engine/fingerprint")
        for url, other in zip(self._urls[1:], found[1:], strict=True):
            if other != found[0]:
                raise RuntimeError(f"{url} has other weights than {self._urls[0]}")
        return found[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers, in their order."""
        return tuple(self._urls)

    async def get_all(self, path: str) -> list[Any]:
        """What every server answers, in their order."""
        self._check()
        await self.connect()
        calls = (self._ask(url, path, self._client.get(url + path)) for url in self._urls)
        return await self._all(calls)

    async def call_all(self, path: str, *bodies: dict[str, Any]) -> list[Any]:
        """POST to every server, to each its own body, or to all the one or none that is given."""
        self._check()
        await self.connect()
        own = bodies if len(bodies) == len(self._urls) else (bodies or ({},)) * len(self._urls)
        pairs = zip(self._urls, own, strict=True)
        return await self._all(self._post(url, path, body) for url, body in pairs)

    def now_at(self, version: int) -> None:
        """All servers have taken new weights on a way of their own."""
        self._version = version

    async def pause(self) -> None:
        """See Engine."""
        await self.connect()
        await self._all(self._post(url, "/engine/pause", {}) for url in self._urls)
        self._paused = True

    async def resume(self) -> None:
        """See Engine."""
        await self.connect()
        await self._all(self._post(url, "/engine/resume", {}) for url in self._urls)
        self._paused = False

    async def abort(self, key: tuple[Any, ...] = ()) -> int:
        """See Engine; ends this client's requests, nobody else's."""
        mine = [c for c, own in self._calls.items() if own[: len(key)] == key and not c.done()]
        for call in mine:
            call.cancel()
        return len(mine)

    def health(self) -> Health:
        """See Engine; what this client has asked for."""
        self._check()
        running, waiting = (0, len(self._calls)) if self._paused else (len(self._calls), 0)
        return Health(
            self._version, running, waiting, self._generated, self._prefilled, 0, self._paused
        )

    async def close(self) -> None:
        """See Engine; the servers stay."""
        self._closed = True
        await self.abort()
        while self._calls:  # each ends by itself, now that it is cancelled
            await asyncio.wait(set(self._calls))
            await asyncio.sleep(0)
        for outbox in self._outboxes.values():
            await outbox.close()
        await self._client.aclose()

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the remote engine has failed: {self._failure}") from self._failure
        if self._closed:
            raise RuntimeError("the engine is closed")

    async def _ask_while(
        self, key: tuple[Any, ...], ask_server: Callable[[str], Awaitable[Any]]
    ) -> Any:
        """What the server of `key` answers; None where the request was aborted meanwhile."""

        async def ask() -> Any:
            await self.connect()
            return await ask_server(self._of(key))

        call = asyncio.ensure_future(ask())
        self._calls[call] = key
        try:
            await asyncio.wait({call})
            return None if call.cancelled() else call.result()
        finally:
            call.cancel()
            del self._calls[call]

    async def _generate(self, url: str, body: dict[str, Any]) -> Any:
        """Completions as the server sends them, asked for together with others."""
        outbox = self._outboxes.setdefault(url, Outbox(self._client, url, self._judge(url)))
        try:
            return await outbox.ask(body)
        except httpx.TransportError as error:
            raise self._lost(url, "/engine/stream", error) from error

    def _of(self, key: tuple[Any, ...]) -> str:
        """The server of a key's task."""
        return self._urls[zlib.crc32(repr(key[:2]).encode()) % len(self._urls)]

    async def _post(self, url: str, path: str, body: Any) -> Any:
        sent: dict[str, Any] = {"content" if isinstance(body, bytes) else "json": body}
        return await self._ask(url, path, self._client.post(f"{url}{path}", **sent))

    async def _ask(self, url: str, path: str, call: Awaitable[httpx.Response]) -> Any:
        """The answer to one request. What the server refuses is a ValueError or a RuntimeError; a
        server that is gone ends the engine.
        """
        try:
            response = await call
        except httpx.TransportError as error:
            raise self._lost(url, path, error) from error
        self._judge(url)(response)
        return response.json()

    def _lost(self, url: str, path: str, error: httpx.TransportError) -> Exception:
        """A server that is gone ends the engine; the error that says so."""
        late = isinstance(error, httpx.TimeoutException)
        what = "did not answer in time" if late else "is gone"
        self._failure = RuntimeError(
            f"the rollout server {url} {what} ({path}): {error or type(error).__name__}"
        )
        return self._failure

    def _judge(self, url: str) -> Callable[[httpx.Response], None]:
        """Raises where an answer is not this server's, or not good."""

        def check(response: httpx.Response) -> None:
            self._same_instance(url, response)
            if response.status_code != 200:
                kind = ValueError if response.status_code in (400, 422) else RuntimeError
                path = response.url.path
                raise kind(f"{url}{path} ({response.status_code}): {_message(response)}")

        return check

    def _same_instance(self, url: str, response: httpx.Response) -> None:
        if response.headers.get(INSTANCE, self._instances[url]) != self._instances[url]:
            self._failure = RuntimeError(
                f"the rollout server {url} was started again: the weights of version "
                f"{self._version} are lost there"
            )
            raise self._failure

    async def _all(self, calls: Iterator[Coroutine[Any, Any, Any]]) -> list[Any]:
        """All of them end before the first failure is raised."""
        found = await asyncio.gather(*calls, return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found


def _buckets(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in parts of about BUCKET_BYTES."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        part[name] = tensor.detach().cpu().contiguous()
        size += tensor.numel() * tensor.element_size()
        if size >= BUCKET_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _message(response: httpx.Response) -> str:
    """What an answer says is wrong."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]


def _completion(wire: Mapping[str, Any]) -> Completion:
    """From JSON, whose keys are texts."""
    rows = wire["alternatives"]
    alternatives = [{int(token): p for token, p in row.items()} for row in rows]
    return Completion(**{**wire, "alternatives": alternatives})

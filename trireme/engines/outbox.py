"""Outbox: sends the generations that are asked for at one time to a server in one request, or in
as few as it takes.

The answers come as lines, each when its generation has ended. A caller that is cancelled tells the
server so; the others go on.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from trireme.engines.engine import MOST_SAMPLES

GATHER_S = 0.002
"""How long a request waits for others."""
MOST_TOKENS = 2**21
"""Of the prompts in one request: about 14 MiB of JSON."""

Asked = list[tuple[dict[str, Any], asyncio.Future[Any]]]


class Outbox:
    """Of one server."""

    def __init__(
        self, client: httpx.AsyncClient, url: str, check: Callable[[httpx.Response], None]
    ) -> None:
        """`check` raises where a response's head says that something is wrong."""
        self._client = client
        self._url = url
        self._check = check
        self._waiting: Asked = []
        self._work: set[asyncio.Task[None]] = set()

    async def ask(self, request: dict[str, Any]) -> Any:
        """The completions of one generation; None where it was aborted at the server.

        Raises httpx.TransportError where the server is gone, ValueError and RuntimeError with its
        sentence.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if len(self._waiting) == 1:
            self._background(self._send())
        return await answer

    async def close(self) -> None:
        """Give up what is under way."""
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    async def _send(self) -> None:
        await asyncio.sleep(GATHER_S)
        waiting, self._waiting = self._waiting, []
        for batch in _batches(waiting):
            self._background(self._post(batch))

    async def _post(self, batch: Asked) -> None:
        name = secrets.token_hex(8)
        for index, (_, answer) in enumerate(batch):
            answer.add_done_callback(lambda done, index=index: self._gone(done, name, index))
        body = {"id": name, "requests": [request for request, _ in batch]}
        failure: BaseException = httpx.ReadError("the server ended its answer early")
        try:
            async with self._client.stream("POST", f"{self._url}/engine/stream", json=body) as got:
                if got.status_code != 200:
                    await got.aread()
                self._check(got)
                async for line in got.aiter_lines():
                    found = json.loads(line)
                    _settle(batch[found["index"]][1], found)
        except asyncio.CancelledError:
            failure = asyncio.CancelledError()
            raise
        except Exception as error:  # every caller gets it
            failure = error
        finally:
            for _, answer in batch:
                if answer.done():
                    continue
                if isinstance(failure, asyncio.CancelledError):
                    answer.cancel()
                else:
                    answer.set_exception(failure)

    def _gone(self, answer: asyncio.Future[Any], name: str, index: int) -> None:
        """The caller has been cancelled: its generation need not go on."""
        if answer.cancelled() and not self._client.is_closed:
            self._background(self._cancel(name, index))

    async def _cancel(self, name: str, index: int) -> None:
        body = {"id": name, "index": index}
        try:
            await self._client.post(f"{self._url}/engine/cancel", json=body, timeout=10)
        except (httpx.TransportError, RuntimeError):
            return  # the server is gone, or we are: nothing is left to be cancelled

    def _background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


def _batches(waiting: Asked) -> Iterator[Asked]:
    """In their order, no more at once than a server takes."""
    batch: Asked = []
    samples = tokens = 0
    for request, answer in waiting:
        n, length = request["sampling"]["n"], len(request["ids"])
        if batch and (samples + n > MOST_SAMPLES or tokens + length > MOST_TOKENS):
            yield batch
            batch, samples, tokens = [], 0, 0
        batch.append((request, answer))
        samples, tokens = samples + n, tokens + length
    if batch:
        yield batch


def _settle(answer: asyncio.Future[Any], found: dict[str, Any]) -> None:
    if answer.done():
        return
    if "error" in found:
        kind = ValueError if found["status"] == 400 else RuntimeError
        answer.set_exception(kind(found["error"]))
    else:
        answer.set_result(found.get("completions"))

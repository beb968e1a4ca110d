"""OpenAI client: real OpenAI clients whose requests reach the rollout's Model, in this process.

From other processes they reach it by its Address, which a gateway provides. Here only the transport
is our own: an httpx transport (newer clients use httpx2, and still accept httpx) that answers
`chat/completions` and `completions`. Every request is recorded like `model.chat`. A ValueError of
the model becomes a 400 with its sentence; any other failure is raised by the client as it is, or as
the cause of its connection error. Nothing is retried. A `timeout` ends the call, and its generation
with it; without one a call has an hour, and its rollout `explorer.max_timeout`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx

from trireme.ext.openai.answer import respond, stream
from trireme.ext.openai.wire import model_entry
from trireme.model.blocking import WAIT_S, on_loop, wait_for

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from trireme.model.model import Model

DONE = "data: [DONE]\n\n"
BASE_URL = "http://rollout.invalid/v1"


def async_client(model: Model) -> AsyncOpenAI:
    """Make a client for coroutines, on the engine's event loop or on another."""
    import openai

    return _client(openai.AsyncOpenAI, httpx.AsyncClient(transport=_AsyncTransport(model)), model)


def sync_client(model: Model) -> OpenAI:
    """Make a client for code in another thread."""
    import openai

    return _client(openai.OpenAI, httpx.Client(transport=_SyncTransport(model)), model)


def _client(make: Callable[..., Any], http: Any, model: Model) -> Any:
    # the library's own time-out, ten minutes, is for servers that answer at once
    options: dict[str, Any] = {"max_retries": 0, "timeout": WAIT_S}
    client = make(api_key="EMPTY", base_url=BASE_URL, http_client=http, **options)
    client.model_path = model.model_path
    return client


class _AsyncTransport(httpx.AsyncBaseTransport):
    def __init__(self, model: Model) -> None:
        self._model = model
        self._loop = model.loop

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread() or b"{}")
        timeout = request.extensions.get("timeout", {}).get("read")
        try:
            async with asyncio.timeout(timeout) as limit:
                return await on_loop(self._loop, answer(self._model, request.url.path, body))
        except TimeoutError as error:
            if not limit.expired():
                raise  # raised by the call itself
            text = f"the OpenAI client got no answer from the engine in {timeout:g} s"
            raise httpx.ReadTimeout(text, request=request) from error


class _SyncTransport(httpx.BaseTransport):
    def __init__(self, model: Model) -> None:
        self._model = model
        self._loop = model.loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read() or b"{}")
        timeout = request.extensions.get("timeout", {}).get("read")
        call = answer(self._model, request.url.path, body)
        try:
            if timeout is None:
                return wait_for(self._loop, call, "the OpenAI client")
            return wait_for(self._loop, call, "the OpenAI client", timeout)
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error), request=request) from error


async def answer(model: Model, path: str, body: dict[str, Any]) -> httpx.Response:
    """Return the response to one request."""
    chat = path.endswith("/chat/completions")
    try:
        if path.endswith("/completions"):
            if not body.get("stream"):
                return httpx.Response(200, json=await respond(model, body, chat=chat))
            lines = [event(chunk) async for chunk in stream(model, body, chat=chat)]
            headers = {"content-type": "text/event-stream"}
            return httpx.Response(200, headers=headers, content="".join([*lines, DONE]).encode())
        entry = model_entry(model.model_path)
        if path.endswith("/models"):
            return httpx.Response(200, json={"object": "list", "data": [entry]})
        if path.endswith(f"/models/{model.model_path}"):
            return httpx.Response(200, json=entry)
    except ValueError as error:
        return _refusal(400, str(error))
    return _refusal(
        404, f"{path} is not supported: expected chat/completions, completions or models"
    )


def event(chunk: dict[str, Any]) -> str:
    """Format a server-sent event."""
    return f"data: {json.dumps(chunk)}\n\n"


def _refusal(status: int, message: str) -> httpx.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    return httpx.Response(status, json={"error": error})

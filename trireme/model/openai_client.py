"""OpenAI client: real OpenAI clients whose requests reach the rollout's Model, in this process.

Only the wire is ours: an httpx transport (newer clients use httpx2, and take httpx still) that
answers `chat/completions` and `completions`. Every request is recorded like `model.chat`. A
ValueError of the model is a 400 with its sentence; any other failure comes out of the client as it
is, or as the cause of its connection error. Nothing is retried.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import httpx

from trireme.model.blocking import on_loop, wait_for
from trireme.model.openai_wire import chat_chunks, chat_response, options_of, text_response

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from trireme.model.model import Model, Reply

BASE_URL = "http://rollout.invalid/v1"


def async_client(model: Model) -> AsyncOpenAI:
    """For coroutines, on the engine's event loop or on another."""
    import openai

    client = openai.AsyncOpenAI(
        api_key="EMPTY",
        base_url=BASE_URL,
        max_retries=0,
        http_client=cast(Any, httpx.AsyncClient(transport=_AsyncTransport(model))),
    )
    client.model_path = model.model_path  # type: ignore[attr-defined]
    return client


def sync_client(model: Model) -> OpenAI:
    """For code in a thread of its own."""
    import openai

    client = openai.OpenAI(
        api_key="EMPTY",
        base_url=BASE_URL,
        max_retries=0,
        http_client=cast(Any, httpx.Client(transport=_SyncTransport(model))),
    )
    client.model_path = model.model_path  # type: ignore[attr-defined]
    return client


class _AsyncTransport(httpx.AsyncBaseTransport):
    def __init__(self, model: Model) -> None:
        self._model = model
        self._loop = model.loop

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread() or b"{}")
        return await on_loop(self._loop, answer(self._model, request.url.path, body))


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
    """The response to one request."""
    try:
        if path.endswith("/chat/completions"):
            return await _answer_chat(model, body)
        if path.endswith("/completions"):
            return await _answer_text(model, body)
        if path.endswith("/models"):
            entry = {"id": model.model_path, "object": "model", "created": 0, "owned_by": "trireme"}
            return httpx.Response(200, json={"object": "list", "data": [entry]})
    except ValueError as error:
        return _refusal(400, str(error))
    return _refusal(404, f"{path} is not served: expected chat/completions, completions or models")


async def _answer_chat(model: Model, body: dict[str, Any]) -> httpx.Response:
    options = options_of(body, chat=True)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise ValueError("the request has no 'messages'")
    replies = await model.chat_samples(messages, body.get("tools"), **options)
    decode = model.chat_tokens.decode
    response = chat_response(replies, body, model.model_path, decode)
    if not body.get("stream"):
        return httpx.Response(200, json=response)
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    return _events(chat_chunks(response, with_usage=usage))


async def _answer_text(model: Model, body: dict[str, Any]) -> httpx.Response:
    if body.get("stream"):
        raise ValueError("'stream' is served for chat/completions only")
    prompt = body.get("prompt")
    if not isinstance(prompt, str) and not (
        isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt)
    ):
        raise ValueError("'prompt' must be one text, or one list of token ids")
    options = options_of(body, chat=False)
    replies: list[Reply] = await model.generate_samples(prompt, **options)
    return httpx.Response(
        200, json=text_response(replies, body, model.model_path, model.chat_tokens.decode)
    )


def _events(chunks: Iterable[dict[str, Any]]) -> httpx.Response:
    """Server-sent events."""
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    content = "".join([*lines, "data: [DONE]\n\n"]).encode()
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=content)


def _refusal(status: int, message: str) -> httpx.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    return httpx.Response(status, json={"error": error})

"""Limits: who may ask, how much at once, and what errors look like. Plain ASGI, for all routes."""

from __future__ import annotations

import hmac
import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trireme.engines.servers import INSTANCE

MAX_BODY = 64 * 2**20
"""Bytes of a request, weights aside."""
OPEN_PATHS = ("/health", "/health/", "/docs", "/openapi.json")


class Limits:
    """Refuses requests without the key (401), too many at once (429) and too large ones (413)."""

    def __init__(self, app: ASGIApp, *, key: str | None, most: int, instance: str) -> None:
        """`most`: requests in flight; looks at health are not counted. `instance` is new with every
        start, and goes with every answer: a client so sees that its weights are gone.
        """
        self._app = app
        self._key = key
        self._most = most
        self._instance = instance.encode()
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY and not _weights(scope):  # no length was announced
                raise HTTPException(413, _too_large(size))
            return message

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (INSTANCE.encode(), self._instance)]
                message = {**message, "headers": headers}
            await send(message)

        self.running += 1
        try:
            await self._app(scope, counted, marked)
        finally:
            self.running -= 1

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
        if self._key is not None:
            given = headers.get("x-api-key") or headers.get("authorization", "")
            if not hmac.compare_digest(given.removeprefix("Bearer ").encode(), self._key.encode()):
                return 401, "this server wants its key: 'Authorization: Bearer KEY' or 'x-api-key'"
        size = headers.get("content-length", "0")
        if not _weights(scope) and size.isdigit() and int(size) > MAX_BODY:
            return 413, _too_large(int(size))
        if self.running >= self._most:
            return 429, f"{self.running} requests are in flight, as many as may be: try again"
        return None


def _weights(scope: Scope) -> bool:
    return scope["path"].startswith("/engine/weights")


def _too_large(size: int) -> str:
    return f"the request has {size} bytes or more: expected at most {MAX_BODY}"


async def _answer(send: Send, status: int, message: str) -> None:
    body = json.dumps(error_body(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 429:
        headers.append((b"retry-after", b"1"))
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}

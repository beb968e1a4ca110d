"""Limits: who may ask, how much at once, and what errors look like. Plain ASGI, for all routes."""

from __future__ import annotations

import hmac
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 64 * 2**20
"""Bytes of a request, weights aside."""
OPEN_PATHS = ("/health", "/health/", "/docs", "/openapi.json")


class Limits:
    """Refuses requests without the key (401), too many at once (429) and too large ones (413)."""

    def __init__(self, app: ASGIApp, *, key: str | None, most: int) -> None:
        """`most`: requests in flight; looks at health are not counted."""
        self._app = app
        self._key = key
        self._most = most
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
        self.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.running -= 1

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        if self._key is not None:
            given = headers.get("x-api-key") or headers.get("authorization", "")
            if not hmac.compare_digest(given.removeprefix("Bearer ").encode(), self._key.encode()):
                return 401, "this server wants its key: 'Authorization: Bearer KEY' or 'x-api-key'"
        size = headers.get("content-length", "0")
        weights = scope["path"].startswith("/engine/weights")
        if not weights and size.isdigit() and int(size) > MAX_BODY:
            return 413, f"the request has {size} bytes: expected at most {MAX_BODY}"
        if self.running >= self._most:
            return 429, f"{self.running} requests are in flight, as many as may be: try again"
        return None


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

"""Bodies: parses and refuses requests' bodies, encodes answers, and cancels abandoned requests.

The body of every route is read by one function, which refuses NaN and half surrogate pairs. The
number of its values has been checked by then, see `room.py`.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from trireme.aio import running
from trireme.ext.http.limits import LARGE_BODY
from trireme.text import as_json, has_half

T = TypeVar("T")
MOST_NAME = 100
"""The longest key at the top level of a body, in characters."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Answer(JSONResponse):
    """A response of JSON. What cannot be encoded is the server's failure, never the client's."""

    def render(self, content: Any) -> bytes:
        """Encode the answer as JSON. Raises RuntimeError if JSON cannot hold it, such as a NaN."""
        try:
            return as_json(content, allow_nan=False, separators=(",", ":")).encode()
        except ValueError as error:
            raise RuntimeError(f"the answer cannot be sent: {error}") from error


class JsonRequest(Request):
    """A request whose body is read by `read_json`."""

    async def json(self) -> Any:
        """Return the parsed body. Raises HTTPException as `read_json` does."""
        body = await self.body()
        if len(body) > LARGE_BODY:
            return await until_gone(self, asyncio.to_thread(read_json, body))
        return read_json(body)


class JsonRoute(APIRoute):
    """A route of such requests."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Return a handler that reads each request as a JsonRequest."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


def read_json(body: bytes) -> Any:
    """Parse a request's body. Raises HTTPException if it is not JSON, or contains an invalid text
    or number.
    """

    def finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise ValueError(f"{text:.40} is not a finite number")
        return number

    def whole(text: str) -> int:
        """Parse an integer as the parser does by itself, but let other threads run between two
        numbers: otherwise the loop would wait until the last token id of a large body has been
        read.
        """
        return int(text)

    try:
        parse_int = whole if len(body) > LARGE_BODY else None
        # only UTF-8: values counted in the bytes of another encoding would differ
        text = body.decode("utf-8-sig")
        parsed = json.loads(text, parse_float=finite, parse_int=parse_int, parse_constant=finite)
        if _SURROGATE.search(body) and has_half(parsed):
            raise HTTPException(400, "the request's body holds half of a surrogate pair")
    except ValueError as error:
        raise HTTPException(400, f"the request's body is not JSON: {error}") from None
    except RecursionError:
        raise HTTPException(400, "the request's body is nested too deeply") from None
    if isinstance(parsed, dict) and (long := [name for name in parsed if len(name) > MOST_NAME]):
        raise HTTPException(
            400, f"the request has a key of {len(long[0])} characters, {long[0][:60]!r}..."
        )
    return parsed


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`; it is cancelled, and its generation aborted, if the client
    disconnects.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass  # the body has been read: only the disconnection may still arrive

    async with running(work, disconnected()) as (task, gone):
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HTTPException(499, "the client has disconnected")

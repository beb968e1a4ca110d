"""App: the rollout server's HTTP face, put together.

Invariants:
- What a client got wrong is a 4xx that names it; a 5xx is ours, an answer that is no JSON included.
- Bodies are read by one function, which takes no NaN, half of a surrogate pair, or deep nesting.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteError

from trireme.model.sampling import what_is_wrong
from trireme.server.limits import Limits, error_body
from trireme.server.rollouts import Rollouts
from trireme.server.sessions import Sessions

T = TypeVar("T")
MOST = 4096
"""Requests in flight; more are refused."""
LARGE_BODY = 2**20
"""Bytes; one that is larger is read beside the event loop."""
STATUS = ((ValueError, 400), (TimeoutError, 504), (FileNotFoundError, 400))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Answer(JSONResponse):
    """JSON that is sent as it is, or is our failure: never the client's."""

    def render(self, content: Any) -> bytes:
        """See JSONResponse. Raises RuntimeError where it is no JSON: for NaN, say."""
        try:
            return super().render(content)
        except ValueError as error:
            raise RuntimeError(f"the answer cannot be sent: {error}") from error


class JsonRequest(Request):
    """A request whose body is read by `read_json`."""

    async def json(self) -> Any:
        """Its body. Raises HTTPException where it is none."""
        body = await self.body()
        if len(body) > LARGE_BODY:
            return await asyncio.to_thread(read_json, body)
        return read_json(body)


class JsonRoute(APIRoute):
    """A route of such requests."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """See APIRoute."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


def read_json(body: bytes) -> Any:
    """What a body holds. Raises HTTPException for what is no JSON, or no text or number in it."""

    def finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise ValueError(f"{text:.40} is no finite number")
        return number

    def whole(text: str) -> int:
        """As the parser does by itself, but other threads run between two numbers: without it the
        loop waits until the last token id of a large body has been read.
        """
        return int(text)

    try:
        parse_int = whole if len(body) > LARGE_BODY else None
        found = json.loads(body, parse_float=finite, parse_int=parse_int, parse_constant=finite)
        if _SURROGATE.search(body):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:
        raise HTTPException(400, "the request's body holds half of a surrogate pair") from None
    except ValueError as error:
        raise HTTPException(400, f"the request's body is not JSON: {error}") from None
    except RecursionError:
        raise HTTPException(400, "the request's body is nested too deeply") from None


def create_app(
    rollouts: Rollouts,
    *,
    key: str | None = None,
    most: int = MOST,
    sessions: Sessions | None = None,
) -> FastAPI:
    """All endpoints over one engine. `key`: what clients must show; `most`: requests in flight.

    With `sessions` those of agents alone: nobody else may steer the engine.
    """
    from trireme.server import (
        engine_routes,
        group_routes,
        openai_routes,
        rollout_routes,
        stream_routes,
    )

    app = FastAPI(title="Trireme rollout server", version="1", default_response_class=Answer)
    app.state.rollouts = rollouts
    app.state.instance = secrets.token_hex(8)
    for path in ("/health", "/health/"):
        app.add_api_route(path, partial(_health, rollouts), methods=["GET"])
    app.include_router(openai_routes.make_router(rollouts, sessions))
    steering = (engine_routes, stream_routes, group_routes, rollout_routes)
    for routes in steering if sessions is None else ():
        app.include_router(routes.make_router(rollouts))
    app.add_middleware(
        Limits,
        key=key,
        most=most,
        instance=app.state.instance,
        max_weights=rollouts.max_weight_bytes,
    )
    kinds = (Exception, RuntimeError, RecursionError, *(kind for kind, _ in STATUS), StarletteError)
    for kind in kinds:
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(RequestValidationError, _failed)
    return app


async def _health(rollouts: Rollouts) -> dict[str, str]:
    rollouts.engine.health()
    return {"status": "ok"}


async def _failed(request: Request, error: Exception) -> JSONResponse:
    """What failed, in one sentence."""
    if isinstance(error, RequestValidationError | ValidationError):
        status = 422 if isinstance(error, RequestValidationError) else 400
        return JSONResponse(error_body(status, what_is_wrong(error.errors())), status)
    if isinstance(error, RecursionError):
        return JSONResponse(error_body(400, "the request is nested too deeply"), 400)
    if isinstance(error, StarletteError):
        return JSONResponse(error_body(error.status_code, error.detail), error.status_code)
    status = next((code for kind, code in STATUS if isinstance(error, kind)), 500)
    return JSONResponse(error_body(status, f"{error}" or type(error).__name__), status)


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; it is cancelled, its generation aborted, when the client has gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HTTPException(499, "the client has gone")
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass  # the body has been read: all that may still come is the end

"""App: the rollout server's HTTP face, put together."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteError

from trireme.server.limits import Limits, error_body
from trireme.server.rollouts import Rollouts
from trireme.server.sessions import Sessions

T = TypeVar("T")
MOST = 4096
"""Requests in flight; more are refused."""
STATUS = ((ValueError, 400), (TimeoutError, 504), (TypeError, 400), (FileNotFoundError, 400))


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

    app = FastAPI(title="Trireme rollout server", version="1")
    app.state.rollouts = rollouts
    app.state.instance = secrets.token_hex(8)
    for path in ("/health", "/health/"):
        app.add_api_route(path, partial(_health, rollouts), methods=["GET"])
    app.include_router(openai_routes.make_router(rollouts, sessions))
    steering = (engine_routes, stream_routes, group_routes, rollout_routes)
    for routes in steering if sessions is None else ():
        app.include_router(routes.make_router(rollouts))
    app.add_middleware(Limits, key=key, most=most, instance=app.state.instance)
    for kind in (Exception, RuntimeError, *(kind for kind, _ in STATUS), StarletteError):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(RequestValidationError, _failed)
    return app


async def _health(rollouts: Rollouts) -> dict[str, str]:
    rollouts.engine.health()
    return {"status": "ok"}


async def _failed(request: Request, error: Exception) -> JSONResponse:
    """What failed, in one sentence."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
        return JSONResponse(error_body(422, f"the request's {field}: {first['msg']}"), 422)
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

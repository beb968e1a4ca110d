"""App: assembles the rollout server's HTTP routes, and runs them under uvicorn.

A client's mistake is a 4xx that names it; a 5xx is ours, including an answer that is not JSON.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteError

from trireme.aio import LoopWatch, running
from trireme.engines.engine import what_is_wrong
from trireme.ext.http import openai_routes
from trireme.ext.http.bodies import Answer
from trireme.ext.http.connections import server_config
from trireme.ext.http.limits import Limits, error_body
from trireme.ext.http.rollouts import Rollouts
from trireme.ext.http.room import MAX_BODY
from trireme.ext.http.sessions import Sessions
from trireme.registry import ROUTES

MOST = 4096
"""Requests in flight; more are refused."""
STATUS = ((ValueError, 400), (TimeoutError, 504), (FileNotFoundError, 400))


def create_app(
    rollouts: Rollouts,
    *,
    key: str | Callable[[str], str | None] | None = None,
    most: int = MOST,
    sessions: Sessions | None = None,
) -> FastAPI:
    """Make the app with all endpoints of one engine.

    `key`: the key that clients must send, or one per path, see Limits. `most`: requests in flight.
    With `sessions` it has only the agents' routes: no client may control the engine.
    """
    app = FastAPI(title="Trireme rollout server", version="1", default_response_class=Answer)
    app.state.rollouts = rollouts
    app.state.instance = secrets.token_hex(8)
    for path in ("/health", "/health/"):
        app.add_api_route(path, partial(_health, rollouts), methods=["GET"])
    app.include_router(openai_routes.make_router(rollouts, sessions))
    if sessions is None:
        for make_router in map(ROUTES.get, ROUTES.built_in()):
            app.include_router(make_router(rollouts))
    app.add_middleware(
        Limits,
        key=key,
        most=most,
        instance=app.state.instance,
        max_weights=rollouts.max_weight_bytes,
        # a client sends pictures in its messages
        max_text=rollouts.max_text if rollouts.chat.reader is None else MAX_BODY,
    )
    kinds = (Exception, RuntimeError, RecursionError, *(kind for kind, _ in STATUS), StarletteError)
    for kind in kinds:
        app.add_exception_handler(kind, _error_response)
    app.add_exception_handler(RequestValidationError, _error_response)
    return app


async def _health(rollouts: Rollouts) -> dict[str, str]:
    rollouts.engine.health()
    return {"status": "ok"}


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError | ValidationError):
        status = 422 if isinstance(error, RequestValidationError) else 400
        return JSONResponse(error_body(status, what_is_wrong(error.errors())), status)
    if isinstance(error, RecursionError):
        return JSONResponse(error_body(400, "the request is nested too deeply"), 400)
    if isinstance(error, StarletteError):
        detail = _not_served(request) if error.detail == "Not Found" else error.detail
        return JSONResponse(error_body(error.status_code, detail), error.status_code)
    status = next((code for kind, code in STATUS if isinstance(error, kind)), 500)
    return JSONResponse(error_body(status, f"{error}" or type(error).__name__), status)


def _not_served(request: Request) -> str:
    """Return the sentence on a path without a route. A base URL without its end is the usual
    cause.
    """
    path = request.url.path
    begin = "Not Found: the base URL of OpenAI's clients ends in /v1, and"
    begin = begin if path.strip("/") in openai_routes.APIS else "Not Found:"
    return f"{begin} {path:.80} is not served here; GET /docs lists what is"


GRACE_S = 5
"""Seconds that pending answers may take when the server is asked to end."""
KEEP_ALIVE_S = 120
"""Seconds that an idle connection stays open: longer than clients keep it, so that none sends into
a connection that is being closed."""


def listen(host: str, port: int) -> socket.socket:
    """Bind the address, before a model is loaded for it. Raises OSError if that is impossible."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    return listener


class AppServer:
    """Serves one app on one socket; all servers of Trireme are such."""

    def __init__(self, app: Any, listener: socket.socket, *, grace: float = GRACE_S) -> None:
        """`grace`: seconds that pending answers get when the server is asked to end."""
        config = server_config(
            app,
            log_level="warning",
            timeout_graceful_shutdown=max(1, int(grace)),
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server: Any = uvicorn.Server(config)
        # uvicorn's own handler would raise the signals again, and end the process before `finally`
        self._server.capture_signals = nullcontext
        self._listener = listener
        self.stopped_by: list[int] = []
        """The signals received, by number; 0 for a call of `stop`."""
        listener.listen(config.backlog)

    @property
    def busy(self) -> bool:
        """True while a request is being answered."""
        return bool(self._server.server_state.tasks)

    def stop(self, number: int = 0) -> bool:
        """Let pending answers finish, and return True; on a second call, end them."""
        self._server.force_exit = bool(self.stopped_by)
        self._server.should_exit = True
        self.stopped_by.append(number)
        return True

    def stop_on_signals(self) -> None:
        """End the server on SIGINT and SIGTERM; the second one ends it at once."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop, number)

    async def serve(
        self,
        watch: Coroutine[Any, Any, None] | None = None,
        *,
        limit: float | None = None,
        watches_loop: bool = True,
    ) -> None:
        """Serve until stopped, or until `watch` ends, whose error is raised here.

        `limit`: seconds that user code (a plug-in's scheduler, for example) may block the event
        loop before the process is ended; None: it is never ended for that. Without `watches_loop`
        the caller watches the loop.
        """
        blocked = LoopWatch(limit) if watches_loop else None
        try:
            async with running(*filter(None, [watch])) as watching:
                for task in watching:
                    task.add_done_callback(self._stop_serving)
                await self._server.serve(sockets=[self._listener])
                for task in watching:
                    if task.done():
                        task.result()
        finally:
            if blocked is not None:
                blocked.stop()

    def _stop_serving(self, _: asyncio.Future[None]) -> None:
        self._server.should_exit = True

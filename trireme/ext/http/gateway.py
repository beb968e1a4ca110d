"""Gateway: gives every rollout an address, where agent programs reach the rollout's Model.

Invariants:
- It listens on loopback only, from a workflow's first request for an address, in the explorer's
  process: whatever the engine, the programs see one server.
- Each address has its own key: a request with another key, or none, is refused. It ends with its
  rollout.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from typing import Any

from trireme.engines.engine import Engine
from trireme.ext.http.rollouts import Rollouts
from trireme.ext.http.sessions import Sessions
from trireme.model.address import Address
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model

MOST_OPEN = 1 << 30
"""Rollouts end by themselves: none is dropped to make room."""


def make_gateway(engine: Engine, chat: ChatTokens, model_path: str, max_model_len: int) -> Gateway:
    """Make the gateway of an explorer with this engine."""
    return Gateway(Rollouts(engine, chat, model_path, max_model_len))


class Gateway:
    """The addresses of an explorer's rollouts. Used from the event loop of their engine."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self._models: dict[str, tuple[Model, str]] = {}
        """By name, with the key."""
        self._count = itertools.count(1)
        self._sessions = Sessions(self._model, most=MOST_OPEN, most_held=float("inf"))
        self._server: Any = None
        self._serving: asyncio.Future[None] | None = None
        self._url = ""

    def address(self, model: Model) -> Address:
        """Return a new address for `model`. Raises OSError if no port is available."""
        self._serve()
        words = re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, model.key)).lower()).strip("-")
        name = f"{words or 'rollout'}-{next(self._count)}"
        key = secrets.token_urlsafe(24)
        self._models[name] = model, key
        return Address(f"{self._url}/s/{name}/v1", key, lambda: self._end(name))

    async def close(self) -> None:
        """End the server; the next address begins another one."""
        server, serving = self._server, self._serving
        self._server = self._serving = None
        if server is not None and serving is not None:
            server.stop()
            server.stop()  # pending answers are of no use to anybody
            await serving

    def _serve(self) -> None:
        if self._serving is not None and self._serving.done():
            self._serving.result()
        if self._server is None:
            from trireme.ext.http.app import AppServer, create_app, listen  # most runs need no HTTP

            listener = listen("127.0.0.1", 0)
            app = create_app(self._rollouts, key=self._key, sessions=self._sessions)
            self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self._server = AppServer(app, listener)
            serving = asyncio.ensure_future(self._server.serve(watches_loop=False))
            serving.add_done_callback(lambda _: listener.close())
            self._serving = serving

    def _end(self, name: str) -> None:
        if self._models.pop(name, None) is not None:
            self._sessions.close(name)

    def _key(self, path: str) -> str | None:
        """Return the key that a client of this path must send; None: every request is refused."""
        _, first, name, *_ = [*path.split("/"), "", ""]
        return self._models[name][1] if first == "s" and name in self._models else None

    def _model(self, name: str, _: int) -> Model:
        """Return the Model of a session; counting tokens needs no session, and any model can do it.

        Raises HTTPException if the rollout has ended since its key was checked: reading a body
        takes time, and its request must not go to another rollout.
        """
        for known in [name] if name else self._models:
            if known in self._models:
                return self._models[known][0]
        from starlette.exceptions import HTTPException  # most runs need no HTTP

        raise HTTPException(410, "the rollout of this address has ended: its model takes no calls")

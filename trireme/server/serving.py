"""Serving: an app on an address until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import nullcontext
from typing import Any

from fastapi import FastAPI

GRACE_S = 5
"""How long answers under way may still take when the server is told to end."""


def listen(host: str, port: int) -> socket.socket:
    """The address taken, before a model is loaded for it. Raises OSError where that cannot be."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    return listener


class AppServer:
    """One app on one socket. Signals and `stop` end it; the second one does so at once."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        import uvicorn

        config = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=75
        )
        self._server: Any = uvicorn.Server(config)
        # its own would raise signals again, and end us before `finally`
        self._server.capture_signals = nullcontext
        self._listener = listener
        self.stopped_by: list[int] = []
        """The signals that came; 0 for `stop`."""
        listener.listen(config.backlog)

    def stop(self, number: int = 0) -> None:
        """Let answers under way end; asked a second time: end them."""
        self._server.force_exit = bool(self.stopped_by)
        self._server.should_exit = True
        self.stopped_by.append(number)

    async def serve(self) -> None:
        """Until it is stopped."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop, number)
        await self._server.serve(sockets=[self._listener])

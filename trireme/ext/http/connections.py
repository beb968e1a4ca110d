"""Connections: limits the number of connections, and how long one may keep the server waiting.

- A request's head must arrive within `HEAD_S` seconds of its first byte or of the connection; so
  must the rest of a body after its answer. A client that reads nothing of its answer for `UNREAD_S`
  seconds counts as gone. limits.py has the time limits of bodies.
- One address may have three quarters of all connections. If there are too many, the one that has
  kept the server waiting longest is closed: one without a complete request, or delayed for a wrong
  key; then one between two requests. A connection whose request is being answered is never closed:
  the newest is refused instead.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import resource
from collections import OrderedDict
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
UNREAD_S = 60.0
MOST_CONNECTIONS = 16384
LEAST_CONNECTIONS = 64
"""The minimum, even if the process may open few files."""
SPARE_FILES = 256
"""Files that the process may open otherwise: weights, databases, the engine's own."""
WAITS = "trireme.waits"
"""A key in an ASGI scope: called when an answer is delayed, and its connection may be closed."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n\r\n"
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class State(Enum):
    """The state of a connection; one in the first two may be closed to make room, in this order."""

    WAITING = 0
    """The server waits for a request."""
    IDLE = 1
    """Between two requests."""
    ANSWERED = 2


class Places:
    """The connections of one address, or of all, by state and in the order of entering it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.by_state: dict[State, OrderedDict[Connection, None]] = {
            s: OrderedDict() for s in State
        }

    def __len__(self) -> int:
        return sum(map(len, self.by_state.values()))

    def put(self, connection: Connection, state: State | None) -> None:
        """Record the connection's state; None: it is closed."""
        for other, members in self.by_state.items():
            if other is not state:
                members.pop(connection, None)
        if state is not None:
            self.by_state[state].setdefault(connection)

    def make_room(self) -> bool:
        """Return whether one more connection fits, after closing a quiet one if necessary."""
        if len(self) < self.most:
            return True
        for state in (State.WAITING, State.IDLE):
            if members := self.by_state[state]:
                next(iter(members)).drop()
                return True
        return False


class Connections:
    """All connections of one server."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: the total; None: the process's limit on open files."""
        self.all = Places(most or most_connections())
        self.by_address: dict[str, Places] = {}

    def admit(self, connection: Connection) -> bool:
        """Return whether there is room for the connection, in all and for its address, and count it
        if so.
        """
        most = max(self.all.most * 3 // 4, 1)
        own = self.by_address.get(connection.address) or Places(most)
        if not (own.make_room() and self.all.make_room()):
            return False
        self.by_address[connection.address] = own
        self.put(connection, State.WAITING)
        return True

    def put(self, connection: Connection, state: State | None) -> None:
        """Record the connection's state, in all and for its address; None: it is closed."""
        self.all.put(connection, state)
        own = self.by_address.get(connection.address)
        if own is not None:
            own.put(connection, state)
            if not len(own):
                del self.by_address[connection.address]


class _UntilClosed:
    """A transport that drops what is written to a closed connection. asyncio's drops it too, but
    logs a line for each write from the sixth on, of which a stream has many before it is cancelled.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


class Connection(H11Protocol):
    """One client's connection. uvicorn's, with limits."""

    def __init__(self, connections: Connections, **parts: Any) -> None:
        super().__init__(**parts)
        self._places = connections
        self._admitted = False
        self._held_back: Any = None
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Admit the client, or send it the answer that the server is full and close."""
        super().connection_made(cast(Any, _UntilClosed(transport)))
        self.address = address_of(self.client[0] if self.client else "")
        self._admitted = self._places.admit(self)
        if self._admitted:
            self._look()
        else:
            transport.write(_FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse the client's data, unless the connection is being closed."""
        if not self.transport.is_closing():
            super().data_received(data)
            self._look()

    def on_response_complete(self) -> None:
        """Update the connection's state after a response."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the counts."""
        self._forget()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop writing, and begin to time how long the client reads nothing."""
        super().pause_writing()
        self._look_at_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Write again, and stop timing the client."""
        super().resume_writing()
        self._unread = _ended(self._unread)

    def drop(self) -> None:
        """Close it, to make room."""
        self._forget()
        self.transport.abort()

    def wait(self) -> None:
        """Note that the answer to the current request is delayed."""
        self._held_back = self.cycle
        self._look()

    def _look(self) -> None:
        """Update the state after an event, and time a request that is due."""
        if self.transport.is_closing() or not self._admitted:
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            self.scope.setdefault(WAITS, self.wait)  # pyright: ignore
            waits = cycle.more_body or cycle is self._held_back
            state, due = (State.WAITING if waits else State.ANSWERED), False
        else:
            begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
            due = cycle is None or begun
            state = State.WAITING if due else State.IDLE
        self._places.put(self, state)
        if not due:
            self._late = _ended(self._late)
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._is_late)

    def _is_late(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            if self.conn.their_state is h11.IDLE:
                self.transport.write(_LATE)
            self.transport.close()

    def _look_at_reader(self, size: int) -> None:
        """Check later whether the client has read some of the `size` bytes that wait for it."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left < size:
                self._look_at_reader(left)
            else:
                self.drop()

        self._unread = _ended(self._unread) or self.loop.call_later(UNREAD_S, look)

    def _forget(self) -> None:
        self._late, self._unread = _ended(self._late), _ended(self._unread)
        if self._admitted:
            self._admitted = False
            self._places.put(self, None)


def _ended(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _no_fault(record: logging.LogRecord) -> bool:
    """Return False for the traceback of a request that the server's end has cut off."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """Configure uvicorn for an app: the only place that does."""
    protocol = cast(Any, partial(Connection, Connections()))
    logging.getLogger("uvicorn.error").addFilter(_no_fault)  # once, however often it is called
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        # the client is the owner of the connection: a header could name anybody
        proxy_headers=False,
        lifespan="off",  # no app has one, and uvicorn's own complains if an end is forced
        **options,
    )


def most_connections() -> int:
    """Return the most connections of the process; its limit on open files is raised as far as
    possible.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + SPARE_FILES
    if 0 <= soft < wanted:
        raised = wanted if hard < 0 else min(wanted, hard)
        # a system may have another limit than the one it reports, such as macOS
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    files = Path("/proc/self/fd")
    is_open = len(os.listdir(files)) if files.exists() else 0
    free = soft - is_open - SPARE_FILES if soft >= 0 else MOST_CONNECTIONS
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, free))


def address_of(host: str) -> str:
    """Return the address that a connection counts for: the host's, or for IPv6 its network of 64
    bits, which one client has.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if not address.is_loopback:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)

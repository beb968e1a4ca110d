"""Connections that keep a server waiting end, and nobody who asks is shut out by them."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.ext.http import bad
from tests.ext.http.made import on_port, served_app, until
from tests.ext.http.test_limits import fake_rollouts
from tests.limits import HANG_S
from trireme.ext.http import connections
from trireme.ext.http.connections import Connections, State, address_of
from trireme.ext.http.limits import WrongKeys

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
ASKED = {"prompt": "ab"}


@asynccontextmanager
async def raw(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection without a client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What came before the server closed the connection; fails where it does not."""
    text = b""
    with suppress(ConnectionResetError):
        while piece := await asyncio.wait_for(reader.read(2**16), HANG_S):
            text += piece
    return text


def test_honest_clients_are_served_beside_1024_half_open_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 256)
    opened: list[asyncio.StreamWriter] = []

    async def main() -> None:
        async with on_port(fake_rollouts(wait=0.2)) as url:
            port = int(url.rpartition(":")[2])
            done = False

            async def honest(client: httpx.AsyncClient) -> int:
                count = 0
                while not done:
                    answer = await client.post("/v1/completions", json=ASKED)
                    assert answer.status_code == 200
                    count += 1
                return count

            # a connection each: one that is between two requests may be closed for another
            pool = httpx.Limits(max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=url, timeout=HANG_S, limits=pool) as client:
                honestly = [asyncio.ensure_future(honest(client)) for _ in range(3)]
                for number in range(1024):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    heads = (b"", b"POST /v1/comp", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{")
                    writer.write(heads[number % 4])
                    opened.append(writer)
                done = True
                assert all([count > 0 for count in await asyncio.gather(*honestly)])
                assert (await client.get("/health")).status_code == 200
            for writer in opened:
                writer.transport.abort()

    asyncio.run(main())


def test_a_head_has_its_time_however_slowly_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.8)

    async def main() -> None:
        async with on_port(fake_rollouts()) as url:
            async with raw(url) as (reader, _):
                assert await ended(reader) == connections._LATE, "nothing has come at all"
            async with raw(url) as (reader, writer):

                async def trickle() -> None:
                    for byte in HEAD * 9:
                        writer.write(bytes([byte]))
                        await asyncio.sleep(0.05)

                slow = asyncio.ensure_future(trickle())
                assert b"408" in await ended(reader)
                slow.cancel()
            async with raw(url) as (reader, writer):  # a second request of a good connection
                writer.write(HEALTH)
                assert b"200 OK" in await reader.readuntil(b'{"status":"ok"}')
                await asyncio.sleep(1.2)
                writer.write(HEALTH)
                assert b"200 OK" in await reader.readuntil(b'{"status":"ok"}'), "quiet is not slow"
                writer.write(HEALTH[:20])
                assert b"408" in await ended(reader)
            async with raw(url) as (reader, writer):  # the rest of a body that was refused
                writer.write(HEAD + b"Content-Length: 99999999999\r\n\r\n{")
                assert b"413" in await ended(reader)

    asyncio.run(main())


def test_what_is_being_answered_is_not_closed_and_then_the_newest_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 5)  # 3 an address

    async def main() -> None:
        async with (
            on_port(fake_rollouts(wait=1.0)) as url,
            httpx.AsyncClient(base_url=url, timeout=HANG_S) as client,
            httpx.AsyncClient(base_url=url) as other,
        ):
            asked = [
                asyncio.ensure_future(client.post("/v1/completions", json=ASKED)) for _ in range(3)
            ]
            await asyncio.sleep(0.5)
            async with raw(url) as (reader, writer):
                writer.write(HEALTH)
                assert b"503 Service Unavailable" in await ended(reader)
            assert [a.status_code for a in await asyncio.gather(*asked)] == [200] * 3
            # these are between two requests now, and give way to those that come
            assert (await other.get("/health")).status_code == 200

    asyncio.run(main())


def test_who_waits_behind_a_wrong_key_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 8)  # 6 an address
    monkeypatch.setattr(WrongKeys, "FREE", 0)
    monkeypatch.setattr(WrongKeys, "FIRST_S", 100.0)
    monkeypatch.setattr(WrongKeys, "MOST_S", 100.0)
    wrong = bad.HIDDEN.replace(b"\r\n\r\n", b"\r\nx-api-key: guess\r\n\r\n")

    async def main() -> None:
        async with on_port(fake_rollouts(), key="secret") as url, AsyncExitStack() as stack:
            for _ in range(20):
                _, writer = await stack.enter_async_context(raw(url))
                writer.write(wrong + wrong[:9])
            headers = {"x-api-key": "secret"}
            async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                assert (await client.post("/v1/completions", json=ASKED)).status_code == 200

    asyncio.run(main())


def test_a_client_that_takes_no_answer_is_let_go_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.5)
    over: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": b"x" * 2**18, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        over.append(scope["path"])

    async def main() -> None:
        async with served_app(app) as url:
            async with raw(url) as (reader, writer):
                writer.write(HEALTH.replace(b"health", b"never"))
                await until(lambda: over == ["/never"])
                del reader
            async with raw(url) as (reader, writer):
                writer.write(HEALTH.replace(b"health", b"slow").replace(b"1.1", b"1.0"))
                size = 0
                while piece := await reader.read(2**18):
                    size += len(piece)
                    await asyncio.sleep(0.03)
                assert size > 64 * 2**18

    asyncio.run(main())


def test_nothing_is_logged_when_a_client_leaves_in_the_middle_of_a_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clients: list[socket.socket] = []
    over: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        clients.pop().close()
        for _ in range(64):  # the tokens of one step, before the loop sees that the client is gone
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        over.append(scope["path"])

    async def main() -> None:
        async with served_app(app) as url:
            client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            clients.append(client)
            client.sendall(HEALTH)
            await until(lambda: over == ["/health"])

    asyncio.run(main())
    assert not [record for record in caplog.records if "socket.send()" in record.message]


class Quiet:
    """In place of a connection."""

    def __init__(self, table: Connections, address: str) -> None:
        self.address, self.table, self.dropped = address, table, False

    def drop(self) -> None:
        self.dropped = True
        self.table.put(self, None)  # pyright: ignore


def test_an_address_does_not_take_the_room_of_others() -> None:
    table = Connections(8)
    many: Any = [Quiet(table, "192.0.2.1") for _ in range(20)]
    assert all(table.admit(one) for one in many)
    assert [one.dropped for one in many] == [True] * 14 + [False] * 6
    for one in many[14:]:
        table.put(one, State.ANSWERED)
    assert not table.admit(many[0])
    other: Any = Quiet(table, "192.0.2.2")
    assert table.admit(other) and len(table.all) == 7
    half, idle, last, newest = ([Quiet(table, f"192.0.2.{n}") for n in (3, 4, 5, 6)])  # fmt: skip
    assert table.admit(idle)  # pyright: ignore
    table.put(idle, State.IDLE)  # pyright: ignore
    for one in (half, last, newest):
        assert table.admit(one)  # pyright: ignore
    assert other.dropped and half.dropped and not idle.dropped, "half-open ones go first"
    for one in (last, newest):
        table.put(one, State.ANSWERED)  # pyright: ignore
    for one in [*many[14:], last, newest, idle]:
        table.put(one, None)
    assert not len(table.all) and not table.by_address


def test_an_address_of_ipv6_is_its_network() -> None:
    assert address_of("2001:db8::1") == address_of("2001:db8::ffff") == "2001:db8::/64"
    assert address_of("::ffff:192.0.2.1") == "192.0.2.1"
    assert (address_of("127.0.0.1"), address_of("::1"), address_of("")) == ("127.0.0.1", "::1", "")


LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(("name", "data", "statuses"), bad.WIRE, ids=[w[0] for w in bad.WIRE])
def test_no_request_hides_in_another(
    name: str, data: bytes, statuses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All answers until the server closes the connection, by itself or asked to."""
    if statuses == [413]:  # the rest of the body is waited for
        monkeypatch.setattr(connections, "HEAD_S", 0.5)
    goes_on = statuses[-1:] == [200]

    async def main() -> None:
        async with on_port(fake_rollouts()) as url:
            async with raw(url) as (reader, writer):
                writer.write(data + (LAST if goes_on else b""))
                if not statuses:
                    await asyncio.sleep(0.2)
                    writer.write_eof()
                text = await ended(reader)
            found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", text)]
            assert found == statuses + [200] * goes_on, name
            async with raw(url) as (reader, writer):
                writer.write(LAST)
                assert b"200 OK" in await ended(reader)

    asyncio.run(main())


def test_a_system_that_refuses_more_files_is_served_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As macOS does, where no limit is named and there is one."""

    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2048, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    most = connections.most_connections()
    assert connections.LEAST_CONNECTIONS <= most <= 2048 - connections.SPARE_FILES

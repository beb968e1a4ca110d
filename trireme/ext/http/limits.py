"""Limits: decides which clients may send requests and how many at once, and words the errors. Plain
ASGI.

- A request takes a slot once its body has arrived, not before: slow clients delay no other.
- A web page cannot drive a server of this machine: browsers send the page in Origin and the
  resolved name in Host, and a page may not post `application/json` without asking.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trireme.ext.http import INSTANCE
from trireme.ext.http.connections import WAITS, address_of
from trireme.ext.http.room import NoRoom, look_inside, room_of
from trireme.text import joined

LARGE_BODY = 2**16
"""Bytes; a larger body is checked outside the event loop."""
MAX_HELD = 2 * 2**30
"""Bytes of all bodies that are in memory at once; the first one may be larger."""
BODY_S, BODY_RATE = 30.0, 2**20
"""Seconds that a body may take, plus one second per this many bytes received."""
OPEN_PATHS = ("/health", "/health/", "/docs", "/openapi.json")
WEIGHTS = "/engine/weights"
"""Its bodies are safetensors; all others are JSON."""
LEAST_KEY = 16
"""Characters of a key that cannot be guessed if they are random."""


class Refused(Exception):
    """A request that no route receives: the status of the answer, and the reason."""


def bearer(headers: Mapping[str, str]) -> str:
    """The credentials of an Authorization header, whose scheme may be in any case (RFC 9110, 11.1),
    or the header as it is where it names no scheme; "" without one.
    """
    shown = headers.get("authorization", "")
    scheme, _, credentials = shown.partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else shown


class Limits:
    """Refuses requests without the key (401), from web pages (403), of another content type (415),
    too large (413) or too slow ones (408), and too many at once (429).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str | Callable[[str], str | None] | None,
        most: int,
        instance: str,
        max_weights: int,
        max_text: int,
    ) -> None:
        """`key`: the key that clients must send, or one per path, where none means that nobody is
        served. `most`: requests in flight; health checks are not counted. `instance` changes with
        every start, and is part of every answer: so a client notices that its weights are gone.
        `max_weights`: bytes of a body of weights; `max_text`: characters of a conversation.
        """
        self._app = app
        self._key = key
        self._most = most
        self._instance = instance.encode()
        self._max_weights = max_weights
        self._max_text = max_text
        self._wrong_keys = WrongKeys()
        self._held = 0
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            held += size
            self._held += size
            if self._held > max(MAX_HELD, held):
                raise Refused(
                    429, "the bodies in flight fill the memory reserved for them: try again"
                )

        try:
            headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
            _look_at_framing(headers)
            self._look_at_page(headers)
            if scope["path"] not in OPEN_PATHS:
                await self._look_at(scope, headers)
                body = await self._whole(scope, receive, hold)
                if body is None:
                    return  # the client disconnected in the middle of it
                _look_at_kind(scope, headers, body)
                if scope["path"] != WEIGHTS:
                    await self._look_inside(scope, body)
                self._look_for_room()
                await self._serve(scope, body, receive, send)
            else:
                await self._app(scope, receive, send)
        except Refused as refusal:
            await _answer(send, *refusal.args)
        finally:
            self._held -= held

    async def _serve(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return rest.pop() if rest else await receive()

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (INSTANCE.encode(), self._instance)]
                message = {**message, "headers": headers}
            await send(message)

        self.running += 1
        try:
            await self._app(scope, replayed, marked)
        finally:
            self.running -= 1

    def _look_at_page(self, headers: Mapping[str, str]) -> None:
        """Raise Refused for a browser's request from a page that is not ours."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise Refused(
                403, f"a page of {origin!r:.80} may not send requests to this server (Origin)"
            )
        if self._key is None and not _is_loopback(host):
            raise Refused(
                403,
                f"Host is {host!r:.80}: expected localhost or a loopback address, since this "
                "server has no key (with one, in TRIREME_API_KEY, any name is accepted)",
            )

    async def _look_at(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raise Refused for anything wrong before the body."""
        key = self._key(scope["path"]) if callable(self._key) else self._key
        if callable(self._key) and key is None:
            raise Refused(401, "there is no rollout at this address, or it has ended")
        if key is not None:
            shown = headers.get("x-api-key") or bearer(headers)
            if not hmac.compare_digest(shown.encode(), key.encode()):
                if shown:  # a client without any token does not guess
                    await self._wrong_keys.wait(scope)
                raise Refused(
                    401, "this server requires its key: 'Authorization: Bearer KEY' or 'x-api-key'"
                )
        size = headers.get("content-length", "0")
        if size.isdecimal() and int(size) > self._largest(scope):
            raise Refused(413, _too_large(int(size), self._largest(scope)))
        self._look_for_room()

    def _look_for_room(self) -> None:
        if self.running >= self._most:
            raise Refused(
                429, f"{self.running} requests are in flight, which is the limit: try again"
            )

    async def _look_inside(self, scope: Scope, body: bytes) -> None:
        """Raise Refused for a body that contains more than allowed."""
        room = room_of(scope["path"], self._max_text)
        try:
            if len(body) > LARGE_BODY:
                await asyncio.to_thread(look_inside, body, room)
            else:
                look_inside(body, room)
        except NoRoom as error:
            raise Refused(413, str(error)) from None

    async def _whole(self, scope: Scope, receive: Receive, hold: Any) -> bytes | None:
        """The complete body; None if the client has disconnected."""
        parts: list[bytes] = []
        size, most = 0, self._largest(scope)
        start = time.monotonic()
        while True:
            seconds = BODY_S + size / BODY_RATE
            try:
                left = max(start + seconds - time.monotonic(), 0)
                message = await asyncio.wait_for(receive(), left)
            except TimeoutError:  # before Python 3.11 not the built-in one
                raise Refused(
                    408, f"the body did not arrive in {seconds:.0f} s: {size} bytes were received"
                ) from None
            if message["type"] != "http.request":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > most:  # no length was announced
                raise Refused(413, _too_large(size, most))
            hold(len(part))
            parts.append(part)
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _largest(self, scope: Scope) -> int:
        if scope["path"] == WEIGHTS:
            return self._max_weights
        return room_of(scope["path"], self._max_text).bytes


class WrongKeys:
    """Delays requests with a wrong key, those of an address one after the other and ever longer; no
    request with the right key waits for them.
    """

    FREE, FIRST_S, MOST_S, HALF_S = 8, 0.1, 5.0, 60.0
    """The number answered at once; the delay of the next in seconds, doubled for each further one,
    up to the maximum. After each half-life half of an address's are forgotten."""
    MOST_ADDRESSES, MOST_WAITING = 4096, 256
    """That are remembered; requests that wait at once, of all addresses: more are answered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, tuple[float, float, float]] = OrderedDict()
        """How many, as of when, and when the last of them is answered."""
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._seen)

    def seconds(self, address: str) -> float:
        """Return the delay of another request from an address."""
        now = self._clock()
        count, when, until = self._seen.pop(address, (0.0, now, now))
        count = count * 0.5 ** ((now - when) / self.HALF_S) + 1
        pause = 0.0
        if (over := count - self.FREE) > 0:
            pause = min(self.FIRST_S * 2 ** min(over, 60), self.MOST_S)
        until = max(until, now) + pause
        self._seen[address] = count, now, until
        if len(self._seen) > self.MOST_ADDRESSES:
            self._seen.popitem(last=False)
        return min(until - now, 12 * self.MOST_S)

    async def wait(self, scope: Scope) -> None:
        """Wait for the delay; the connection may be closed meanwhile."""
        client = scope.get("client") or ("", 0)
        seconds = self.seconds(address_of(client[0]))
        if not seconds or self._waiting >= self.MOST_WAITING:
            return
        if WAITS in scope:
            scope[WAITS]()
        self._waiting += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._waiting -= 1


def short_key(key: str | None) -> str | None:
    """Return the warning for a key so short that it can be guessed, or None."""
    if key is None or len(key) >= LEAST_KEY:
        return None
    return (
        f"the server's key has {len(key)} characters, and anyone who reaches it may guess it: "
        f"expected {LEAST_KEY} or more random ones, such as from Python's secrets.token_urlsafe()"
    )


def _look_at_framing(headers: Mapping[str, str]) -> None:
    """Raise Refused for a request that declares its length in two ways: another server before this
    one may have read the other, and taken the rest for a separate request.
    """
    if "transfer-encoding" in headers and "content-length" in headers:
        raise Refused(400, "the request has Content-Length and Transfer-Encoding: expected one")


def _look_at_kind(scope: Scope, headers: Mapping[str, str], body: bytes) -> None:
    content_type = headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    expected = "application/octet-stream" if scope["path"] == WEIGHTS else "application/json"
    if body and kind != expected:
        raise Refused(415, f"content-type is {content_type!r:.80}: expected {expected}")


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _too_large(size: int, most: int) -> str:
    return f"the request has {size} bytes or more: expected at most {most} in one request"


async def _answer(send: Send, status: int, message: str) -> None:
    body = json.dumps(error_body(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 429:
        headers.append((b"retry-after", b"1"))
    if status in (400, 408):
        headers.append((b"connection", b"close"))
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error in the form of OpenAI's clients."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = joined(message)  # it may quote half of a surrogate pair
    return {"error": {"message": text, "type": kind, "param": None, "code": status}}

"""Serve: binds an address, prints the page's URL with its token, and ends on Ctrl-C."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from trireme.text import say

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PORT = 6600


@dataclass(frozen=True)
class PageOptions:
    """The options of `trireme view`."""

    root: Path
    host: str = "127.0.0.1"
    port: int | None = None
    """None: the usual one, or any that is free."""
    key_file: Path | None = None
    open_browser: bool = True


def serve(options: PageOptions, ready: Callable[[str], None] | None = None) -> int:
    """Serve until Ctrl-C; `ready` receives the URL. Raises ValueError and OSError before that."""
    import uvicorn

    from trireme.ext.http.connections import server_config
    from trireme.ext.http.limits import short_key
    from trireme.ext.page.app import Page, create_app

    key = _key(options)
    page = Page(options.root)
    listener = _listen(options)
    port = listener.getsockname()[1]
    token = key or secrets.token_urlsafe(16)
    shown = f"[{options.host}]" if ":" in options.host else options.host
    base = f"http://{shown}:{port}/"
    url = f"{base}?token={quote(token)}"
    page.begin()
    config = server_config(create_app(page, token), log_level="error", timeout_graceful_shutdown=1)
    if (said := short_key(key)) is not None:
        say(f"warning: {said}", file=sys.stderr)
    # the reader of this line supplied a key, while a token is valid for this server only
    say(f"{len(page.runs)} run{'s' * (len(page.runs) > 1)} in {options.root}")
    say(f"open {base}?token=<the key>" if key else f"open {url}")
    say("press Ctrl-C to stop", flush=True)
    if ready is not None:
        ready(url)
    elif options.open_browser and _has_desktop():
        webbrowser.open(url)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
    return 0


def _key(options: PageOptions) -> str | None:
    """Return the key that clients must send; None: a token of this server, on loopback."""
    key = os.environ.get("TRIREME_API_KEY") or None
    if options.key_file is not None:
        try:
            key = options.key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--api-key-file {options.key_file} cannot be read: {error}"
            ) from error
        if not key:
            raise ValueError(f"--api-key-file {options.key_file} is empty: expected a key")
    if options.host not in LOOPBACK and key is None:
        raise ValueError(
            f"--host {options.host} is open to other machines: give a key in TRIREME_API_KEY or "
            "with --api-key-file, or serve on 127.0.0.1"
        )
    return key if options.host not in LOOPBACK or options.key_file is not None else None


def _listen(options: PageOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    ports = [PORT, 0] if options.port is None else [options.port]
    for port in ports:
        try:
            listener = socket.create_server((options.host, port), family=family)
        except OSError as error:
            if port != ports[-1]:
                continue
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(
                f"--host {options.host} --port {port} cannot be used: {reason}: expected another "
                "one"
            ) from error
        # an answer's body would wait 40 ms for the browser to acknowledge its headers: asyncio sets
        # this only on sockets that name their protocol, which create_server's do not
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    raise AssertionError("there is a port to try")


def _has_desktop() -> bool:
    if not sys.stdout.isatty() or os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )

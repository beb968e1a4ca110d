"""The page's server: answers the browser's requests, on loopback, if they have the token.

Invariants:
- Every answer except the refusal needs the token: in the URL once, from then on in a cookie that
  scripts cannot read.
- Nothing is changed by a request but the reader's note on a run, and no file is sent but the page's
  own and the chart library.
- Answers contain text of models: the page never gets it as HTML, and may load nothing from other
  sites.
"""

from __future__ import annotations

import gzip
import hmac
import json
import math
import re
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trireme.buffer.picture_files import picture_file
from trireme.ext.http.limits import WrongKeys, bearer
from trireme.ext.page.rollouts import Filter, RolloutIndex, as_item, export
from trireme.ext.page.runs import (
    Curves,
    RunFolder,
    about,
    compared,
    find_runs,
    meanings,
    write_note,
)
from trireme.ext.page.table import Entries
from trireme.ext.page.tokens import Tokens
from trireme.pictures import media_type
from trireme.text import as_json

COOKIE = "trireme_view_{port}"
"""Browsers keep one jar for all ports of a host."""
STATIC = Path(__file__).parent / "static"
UPLOT = Path(__file__).parent / "uplot"
"""The chart library, as its npm package has it (`make page-library`)."""
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
MOST_ROWS = 500
"""Rollouts of one answer."""
LEAST_GZIP = 10_000
MOST_BODY = 20_000
"""Bytes of a note's request."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class Page:
    """The runs below a folder, and the data read from them."""

    def __init__(self, root: Path) -> None:
        """Raises ValueError where `root` has no run."""
        self.root = root
        self.curves = Curves()
        self._entries = Entries()
        self._lock = threading.Lock()
        self._rollouts: dict[str, RolloutIndex] = {}
        self._tokens: dict[str, Tokens] = {}
        self.runs = {run.name: run for run in find_runs(root)}

    def begin(self) -> None:
        """Index the existing data before the first request, in a separate thread."""
        threading.Thread(target=self._index, name="view-index", daemon=True).start()

    def _index(self) -> None:
        for run in list(self.runs.values()):
            self.rollouts(run).refresh()
        import trireme.serialize  # noqa: F401  (torch takes seconds: before the first request needs it)

    def list(self) -> list[dict[str, Any]]:
        """Return all runs, including those that have begun since."""
        self.runs = {run.name: run for run in find_runs(self.root)}
        with self._lock:
            return self._entries.of(list(self.runs.values()))

    def take_note(self, body: Any) -> dict[str, Any]:
        """Replace the note on a run. Raises ValueError for a body that is none."""
        kinds = {"run": str, "text": str, "hidden": bool}
        if not isinstance(body, dict) or any(type(body.get(k)) is not v for k, v in kinds.items()):
            raise ValueError("a note is not readable: expected run, text and hidden")
        write_note(self.run_of(body), body["text"], hidden=body["hidden"])
        return {}

    def compare(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the settings in which two runs differ."""
        return compared(self.run_of(query), self.run_of(query, "other"))

    def run_of(self, query: Mapping[str, str], key: str = "run") -> RunFolder:
        """Return the run that a query names. Raises ValueError for one that does not exist."""
        name = query.get(key, "")
        if name not in self.runs:
            known = ", ".join(self.runs)
            raise ValueError(f"there is no run '{name}' below {self.root}: expected one of {known}")
        return self.runs[name]

    def rollouts(self, run: RunFolder) -> RolloutIndex:
        """Return the index of a run's rollouts, as far as it was read."""
        with self._lock:
            if run.name not in self._rollouts:
                self._rollouts[run.name] = RolloutIndex(run.folder)
            return self._rollouts[run.name]

    def meanings(self, query: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Return the meanings of a run's metrics."""
        return meanings(self.curves.of(self.run_of(query)))

    def search(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of the rollouts that match a filter, and their number.

        `uncounted=1`: `total` may be null, if a search found the page without reading all.
        """
        rollouts = self.rollouts(self.run_of(query))
        rollouts.refresh()
        wanted = filter_of(query)
        first, count = _number(query, "offset", 0), min(_number(query, "limit", 100), MOST_ROWS)
        places = rollouts.leading(wanted, first + count) if query.get("uncounted") == "1" else None
        counted = places is None
        if places is None:
            places = rollouts.select(wanted)
        rows = rollouts.rows(places[first : first + count])
        whole = query.get("whole") == "1"
        return {
            "total": len(places) if counted else None,
            "rows": rows if whole else [as_item(row) for row in rows],
            "facts": rollouts.facts(),
        }

    def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of the groups with a rollout that matches a filter, and their number."""
        rollouts = self.rollouts(self.run_of(query))
        rollouts.refresh()
        count = min(_number(query, "limit", 100), MOST_ROWS)
        total, rows = rollouts.groups(filter_of(query), _number(query, "offset", 0), count)
        return {"total": total, "rows": rows, "facts": rollouts.facts()}

    def rewards(self, query: Mapping[str, str]) -> dict[str, Any] | None:
        """Return how a run's rewards are distributed, step by step; None if all are equal."""
        rollouts = self.rollouts(self.run_of(query))
        rollouts.refresh()
        return rollouts.rewards()

    def rollout(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return one whole rollout, with its messages if a database of the run has them."""
        run, kind, eid = self.run_of(query), query.get("kind", "train"), query.get("eid", "")
        rollouts = self.rollouts(run)
        rollouts.refresh()
        row = rollouts.row(kind, eid)
        experience = self.tokens_of(run).experience(eid) if kind == "train" else None
        if experience is not None:
            row |= {"messages": experience.messages, "tools": experience.tools}
            row.setdefault("info", experience.info)
        return row

    def picture(self, query: Mapping[str, str]) -> Response:
        """Return a picture that a rollout of a run shows. Raises ValueError if it is not stored."""
        run, digest = self.run_of(query), query.get("digest", "")
        path = picture_file(run.folder / "buffer", digest)
        if path is None:
            raise ValueError(f"no picture '{digest:.20}' is stored")
        data = path.read_bytes()
        kind = media_type(data)
        if kind is None:
            raise ValueError(f"picture '{digest:.20}' is in a format that browsers do not show")
        return Response(data, headers={"Cache-Control": "max-age=86400"}, media_type=kind)

    def tokens(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return one rollout, token by token."""
        eid, kind = query.get("eid", ""), query.get("kind", "train")
        return self.tokens_of(self.run_of(query)).of(eid, kind)

    def tokens_of(self, run: RunFolder) -> Tokens:
        """Return the tokens of a run's rollouts."""
        with self._lock:
            return self._tokens.setdefault(run.name, Tokens(run))


def filter_of(query: Mapping[str, str]) -> Filter:
    """Make the filter of a URL's query. Raises ValueError naming a value that is not a number."""

    def real(name: str) -> float | None:
        text = query.get(name, "")
        try:
            return float(text) if text else None
        except ValueError:
            raise ValueError(f"{name} is '{text}': expected a number") from None

    return Filter(
        kind=query.get("kind") or None,
        step=_number(query, "step", 0) if query.get("step") else None,
        task=query.get("task") or None,
        group=query.get("group") or None,
        least=real("least"),
        most=real("most"),
        cut={"1": True, "0": False}.get(query.get("cut", "")),
        disagree=query.get("disagree") == "1",
        text=query.get("text", ""),
        order=query.get("order") or "newest",
        seed=_number(query, "seed", 0),
    )


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"{name} is '{text}': expected a whole number") from None


def create_app(page: Page, token: str) -> ASGIApp:
    """Make the whole server."""

    def answer(look_up: Callable[[Mapping[str, str]], Any]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            try:
                value = look_up(request.query_params)
                return value if isinstance(value, Response) else _response(value, request)
            except (ValueError, RecursionError) as error:
                return _response({"error": str(error)}, request, 400)
            except (OSError, sqlite3.Error) as error:
                text = f"a file of the run cannot be read: {error}"
                return _response({"error": text}, request, 500)

        return endpoint

    routes = [
        Route("/", _index),
        Route("/static/{name}", _file_of(STATIC)),
        Route("/uplot/{name}", _file_of(UPLOT)),
        Route("/api/runs", answer(lambda query: page.list())),
        Route("/api/curves", answer(lambda query: page.curves.of(page.run_of(query)))),
        Route("/api/meanings", answer(page.meanings)),
        Route("/api/about", answer(lambda query: about(page.run_of(query)))),
        Route("/api/note", _take_note(page), methods=["POST"]),
        Route("/api/compare", answer(page.compare)),
        Route("/api/rollouts", answer(page.search)),
        Route("/api/groups", answer(page.groups)),
        Route("/api/rewards", answer(page.rewards)),
        Route("/api/rollout", answer(page.rollout)),
        Route("/api/tokens", answer(page.tokens)),
        Route("/api/picture", answer(page.picture)),
        Route("/api/export", answer(lambda query: _export(page, query))),
    ]
    return Guard(Starlette(routes=routes), token)


def _take_note(page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        # a form of another site cannot send JSON, whatever the browser does with the cookie
        if request.headers.get("content-type") != "application/json":
            return _response({"error": "a note is not JSON"}, request, 415)
        if int(request.headers.get("content-length") or MOST_BODY + 1) > MOST_BODY:
            return _response({"error": "a note is too long"}, request, 413)
        try:
            return _response(page.take_note(json.loads(await request.body())), request)
        except (ValueError, RecursionError) as error:
            return _response({"error": str(error)}, request, 400)
        except OSError as error:
            text = f"the note cannot be written: {error}"
            return _response({"error": text}, request, 500)

    return endpoint


def _response(value: Any, request: Request, status: int = 200) -> Response:
    try:
        body = as_json(value, allow_nan=False, default=str).encode()  # dates
    except ValueError:  # rarely: it takes longer
        body = as_json(_finite(value), allow_nan=False, default=str).encode()
    headers = {"Cache-Control": "no-store"}
    if len(body) > LEAST_GZIP and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
    return Response(body, status, headers, "application/json")


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have, such as `.inf` among options, by their texts."""
    if isinstance(value, Mapping):
        return {_finite(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _export(page: Page, query: Mapping[str, str]) -> Response:
    form = query.get("format", "jsonl")
    if form not in ("jsonl", "parquet"):
        raise ValueError(f"format is '{form}': expected jsonl or parquet")
    rollouts = page.rollouts(page.run_of(query))
    rollouts.refresh()
    parts = export(rollouts, rollouts.select(filter_of(query)), form)
    if form == "parquet":  # written whole: an error is an answer, and no file that breaks off
        parts = iter([b"".join(parts)])
    name = f"{query.get('run', 'run').replace('/', '_')}_rollouts.{form}"
    kind = "application/jsonl" if form == "jsonl" else "application/vnd.apache.parquet"
    plain = re.sub(r"[^\w. -]", "_", name, flags=re.ASCII)  # a header cannot contain other names
    named = f"filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"
    headers = {"Content-Disposition": f"attachment; {named}"}
    return StreamingResponse(parts, 200, headers, kind)


def _index(request: Request) -> Response:
    return Response((STATIC / "index.html").read_bytes(), media_type="text/html")


def _file_of(folder: Path) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        path = folder / request.path_params["name"]
        if path.parent != folder or path.suffix not in TYPES or not path.is_file():
            raise HTTPException(404)
        return Response(path.read_bytes(), media_type=TYPES[path.suffix])

    return endpoint


class Guard:
    """Refuses requests without the token, and restricts what the page may load. Plain ASGI."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        self._wrong_keys = WrongKeys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        cookie = COOKIE.format(port=(scope.get("server") or ("", 0))[1])
        shown = (token, bearer(request.headers), request.cookies.get(cookie, ""))
        if not any(self._is(text) for text in shown):
            if any(shown):  # a client without any token does not guess
                await self._wrong_keys.wait(scope)
            text = "This page needs its token: open the whole URL that trireme view printed.\n"
            await Response(text, 401, media_type="text/plain")(scope, receive, send)
            return
        if token and scope["path"] == "/":  # out of the address line, and of the browser's history
            response = RedirectResponse("/", 303)
            if self._is(token):  # with a cookie, an old URL's other token does not matter
                response.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            await response(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [
                    (b"content-security-policy", POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _is(self, text: str) -> bool:
        # a + of a base64 key is read as a space where a URL has it unescaped
        texts = (text.encode(), text.replace(" ", "+").encode())
        return any([hmac.compare_digest(one, self._token.encode()) for one in texts])

"""Agents' routes: the APIs that agent programs speak, each call recorded by its session."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from trireme.ext.http import messages, responses
from trireme.ext.http.bodies import Answer, JsonRoute, until_gone
from trireme.ext.http.limits import bearer, error_body
from trireme.ext.http.rollouts import Rollouts
from trireme.ext.http.sessions import Sessions
from trireme.ext.openai.answer import respond, stream
from trireme.ext.openai.client import DONE, event
from trireme.ext.openai.wire import (
    KNOWN,
    MOST_PROMPTS,
    ChatBody,
    TextBody,
    Wire,
    checked,
    model_entry,
)
from trireme.log import get_logger
from trireme.model.model import Reply
from trireme.registry import did_you_mean
from trireme.serialize import experience_to_wire

logger = get_logger("engine")

APIS: dict[str, type[Wire]] = {
    "chat/completions": ChatBody,
    "completions": TextBody,
    "messages": messages.MessagesBody,
    "messages/count_tokens": messages.MessagesBody,
    "responses": responses.ResponsesBody,
}
"""The APIs of agent programs: paths below `/v1/`, and the bodies that are posted there."""
SAID = 100
"""How many names of keys without effect are logged, once each."""


class FeedbackBody(BaseModel):
    """A reward for a session, or for single replies by their ids."""

    model_config = ConfigDict(extra="forbid")

    reward: float = Field(allow_inf_nan=False)
    session_id: str | None = None
    msg_ids: list[str] = Field(default_factory=list)
    task_id: str = ""
    run_id: int | None = Field(default=None, ge=0)


class CommitBody(BaseModel):
    """The session or task whose group is committed; if neither is given, all groups that have a
    reward. An unknown key is refused: a misspelt one would commit them all.
    """

    model_config = ConfigDict(extra="forbid")

    session_id: str | None = None
    task_id: str | None = None


def make_router(rollouts: Rollouts, recorded: Sessions | None = None) -> APIRouter:
    """Make the routes. `recorded`: the session store to use; None: the router's own.

    Agent programs often send keys for other servers; unknown ones are counted, not refused.
    """
    router = APIRouter(route_class=JsonRoute)
    sessions = Sessions(rollouts.session_model) if recorded is None else recorded
    ignored: Counter[str] = Counter()
    _add_apis(router, rollouts, sessions, ignored, strict=recorded is None)
    _add_figures(router, rollouts, sessions, ignored)

    @router.post("/feedback")
    async def feedback(body: FeedbackBody) -> dict[str, int]:
        count = sessions.reward(
            body.reward,
            session=body.session_id,
            replies=body.msg_ids,
            task=body.task_id,
            run=body.run_id,
        )
        return {"rewarded": count}

    @router.post("/commit")
    async def commit(body: CommitBody) -> dict[str, Any]:
        experiences = sessions.take(body.session_id, body.task_id)
        if sessions.ship is not None:
            await sessions.ship(experiences)
            return {"committed": len(experiences)}
        wires = [experience_to_wire(e) | {"eid": e.eid.uid} for e in experiences]
        return {"committed": len(experiences), "experiences": wires}

    return router


def _add_apis(
    router: APIRouter,
    rollouts: Rollouts,
    sessions: Sessions,
    ignored: Counter[str],
    *,
    strict: bool,
) -> None:
    """Add the routes that agent programs call. `ignored` counts keys that have no effect; `strict`:
    OpenAI's first APIs refuse these.
    """

    async def serve(request: Request, name: str | None) -> Response:
        path = request.url.path
        kind = APIS[path.rpartition("/v1/")[2]]
        body = await _body(request, kind)
        _note(_WITHOUT_EFFECT[kind](body) if kind in _WITHOUT_EFFECT else (), ignored)
        if not strict and kind in (ChatBody, TextBody):
            _note(body.keys() - KNOWN, ignored)
            body = {name: value for name, value in body.items() if name in KNOWN}
        texts = body["prompt"] if kind is TextBody else ()  # others are one conversation
        for text in [texts] if isinstance(texts, str) else texts[:MOST_PROMPTS]:
            rollouts.refuse_long(text)
        if path.endswith("/count_tokens"):
            return Answer(await until_gone(request, _count(sessions, body)))
        before: list[dict[str, Any]] = []
        if path.endswith("/responses") and body.get("previous_response_id"):
            owner, call = sessions.reply(str(body["previous_response_id"]))
            if name is not None and owner.name != name:
                raise ValueError(
                    f"previous_response_id: the reply {body['previous_response_id']!r:.60} "
                    "belongs to another session"
                )
            name, before = owner.name, call.conversation
        with sessions.opened(name) as session:

            def note(reply_id: str, replies: Sequence[Reply]) -> None:
                sessions.note(session, reply_id, [reply.call for reply in replies])

            asked = body
            if path.endswith("/messages"):
                asked = messages.chat_body(body)
            elif path.endswith("/responses"):
                asked = responses.chat_body(body, before)
            chat = not path.endswith("/v1/completions")
            headers = {"x-session-id": session.name}
            if not asked.get("stream"):
                work = respond(session.model, asked, chat=chat, note=note)
                response = _whole(path, await until_gone(request, work), body)
                return Answer(response, headers=headers)
            chunks = stream(session.model, asked, chat=chat, note=note)
            first = await until_gone(request, anext(chunks))  # unserved requests are refused here
            events = _events(path, _all_of(first, chunks), body)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def v1(request: Request) -> Response:
        headers = request.headers
        key = headers.get("x-api-key") or bearer(headers)
        session = key.removeprefix("session:") if key.startswith("session:") else None
        return await serve(request, headers.get("x-session-id", session))

    async def of_session(name: str, request: Request) -> Response:
        return await serve(request, name)

    for path, kind in APIS.items():
        content = {"application/json": {"schema": kind.model_json_schema()}}
        extra = {"requestBody": {"required": True, "content": content}}
        router.add_api_route(f"/v1/{path}", v1, methods=["POST"], openapi_extra=extra)
        session_path = f"/s/{{name}}/v1/{path}"
        router.add_api_route(session_path, of_session, methods=["POST"], openapi_extra=extra)


_WITHOUT_EFFECT: dict[type[Wire], Callable[[dict[str, Any]], Iterable[str]]] = {
    messages.MessagesBody: messages.without_effect,
    responses.ResponsesBody: responses.without_effect,
}
"""APIs whose programs also send keys for other servers."""


def _note(names: Iterable[str], ignored: Counter[str]) -> None:
    """Count, and log at their first time, parts of a body that have no effect."""
    for name in names:
        if name not in ignored and len(ignored) < SAID:
            # a key of the other APIs was meant as it is
            hint = "" if name in KNOWN else did_you_mean(name, KNOWN, " (did you mean '{}'?)")
            logger.warning("the key %.60r of a request has no effect here%s", name, hint)
        ignored[name if name in ignored or len(ignored) < SAID else "others"] += 1


async def _count(sessions: Sessions, body: dict[str, Any]) -> dict[str, int]:
    """Count the tokens of a message as a prompt; no session records it."""
    chat = messages.chat_body(body)
    count = await sessions.alone().prompt_tokens(chat["messages"], chat.get("tools"))
    return {"input_tokens": count}


def _add_figures(
    router: APIRouter, rollouts: Rollouts, sessions: Sessions, ignored: Counter[str]
) -> None:
    @router.get("/v1/models")
    @router.get("/s/{name}/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_entry(rollouts.model_path)]}

    @router.get("/v1/models/{model:path}")
    @router.get("/s/{name}/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        if model == rollouts.model_path:
            return JSONResponse(model_entry(model))
        there = f"there is no model '{model:.80}': this server has '{rollouts.model_path}'"
        return JSONResponse(error_body(404, there), status_code=404)

    @router.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """Report the server's metrics in Prometheus's text format."""
        health = rollouts.engine.health()
        rows = {
            "trireme_weight_version": ("gauge", health.version),
            "trireme_requests_running": ("gauge", health.running),
            "trireme_requests_waiting": ("gauge", health.waiting),
            "trireme_tokens_generated_total": ("counter", health.generated_tokens),
            "trireme_tokens_prefilled_total": ("counter", health.prefilled_tokens),
            "trireme_tokens_from_prefix_cache_total": ("counter", health.cached_tokens),
            "trireme_sessions_open": ("gauge", len(sessions)),
            "trireme_sessions_dropped_total": ("counter", sessions.dropped),
            "trireme_request_keys_ignored_total": ("counter", ignored.total()),
        }
        lines = [f"# TYPE {name} {kind}\n{name} {value}" for name, (kind, value) in rows.items()]
        return PlainTextResponse("\n".join(lines) + "\n")


async def _body(request: Request, kind: type[Wire]) -> dict[str, Any]:
    body = await request.json()
    if not isinstance(body, dict):
        raise ValueError(f"the request's body is {body!r:.60}: it must be a JSON object")
    checked(kind, body)
    return body


def _whole(path: str, completion: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    if path.endswith("/messages"):
        return messages.message_of(completion)
    return responses.response_of(completion, body) if path.endswith("/responses") else completion


async def _all_of(
    first: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[dict[str, Any]]:
    yield first
    async for chunk in chunks:
        yield chunk


async def _events(
    path: str, chunks: AsyncIterator[dict[str, Any]], body: dict[str, Any]
) -> AsyncIterator[str]:
    """Yield the chunks as events in the form of the path; a failure in the middle is the last one,
    since the status has been sent.
    """
    named = path.endswith(("/messages", "/responses"))
    if path.endswith("/messages"):
        chunks = messages.events_of(chunks)
    elif path.endswith("/responses"):
        chunks = responses.events_of(chunks, body)
    try:
        async for chunk in chunks:
            yield f"event: {chunk['type']}\n{event(chunk)}" if named else event(chunk)
    except Exception as error:
        if not isinstance(error, ValueError):
            logger.warning("%s failed in the middle of a stream: %s", path, error, exc_info=True)
        failure = {"type": "error", **error_body(500, str(error) or type(error).__name__)}
        yield f"event: error\n{event(failure)}" if named else event(failure)
    if not named:
        yield DONE

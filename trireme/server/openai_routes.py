"""OpenAI routes: chat and completions for any agent program, each call recorded by its session."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from trireme.model.openai_client import answer
from trireme.server.app import until_gone
from trireme.server.rollouts import Rollouts, experience_to_wire
from trireme.server.sessions import Session, Sessions


class FeedbackBody(BaseModel):
    """A reward for a session, or for single replies by their ids."""

    reward: float = Field(allow_inf_nan=False)
    session_id: str | None = None
    msg_ids: list[str] = Field(default_factory=list)
    task_id: str = ""
    run_id: int | None = Field(default=None, ge=0)


class CommitBody(BaseModel):
    """Which session's or task's group; neither given: all that have a reward."""

    session_id: str | None = None
    task_id: str | None = None


def make_router(rollouts: Rollouts, instance: str, recorded: Sessions | None = None) -> APIRouter:
    """`recorded`: whose sessions these are; None: the router's own."""
    router = APIRouter()
    sessions = Sessions(rollouts.session_model) if recorded is None else recorded

    async def serve(request: Request, session: Session) -> Response:
        body = json.loads(await request.body() or b"{}")
        if not isinstance(body, dict):
            raise ValueError("the request's body must be a JSON object")
        found, index = await until_gone(request, numbered(session, request.url.path, body))
        kind = found.headers.get("content-type", "")
        if found.status_code == 200:
            text = found.text
            first = (
                text.partition("data: ")[2].partition("\n")[0] if "event-stream" in kind else text
            )
            calls = [call for call in session.model.recorder if call.index == index]
            sessions.note(session, str(json.loads(first).get("id")), calls)
        headers = {"content-type": kind, "x-session-id": session.name}
        return Response(found.content, found.status_code, headers=headers)

    @router.post("/v1/chat/completions")
    @router.post("/v1/completions")
    async def v1(request: Request) -> Response:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        own = key.removeprefix("session:") if key.startswith("session:") else None
        return await serve(request, sessions.open(request.headers.get("x-session-id", own)))

    @router.post("/s/{name}/v1/chat/completions")
    @router.post("/s/{name}/v1/completions")
    async def of_session(name: str, request: Request) -> Response:
        return await serve(request, sessions.open(name))

    @router.get("/v1/models")
    @router.get("/s/{name}/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": rollouts.model_path, "object": "model", "created": 0, "owned_by": "trireme"}
        return {"object": "list", "data": [entry]}

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

    @router.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """For Prometheus, in its text form."""
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
        }
        lines = [f"# TYPE {name} {kind}\n{name} {value}" for name, (kind, value) in rows.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    return router


async def numbered(session: Session, path: str, body: dict[str, Any]) -> tuple[Any, int]:
    """The response, and the number of its request among the session's.

    No other request records anything between the last await of `answer` and this.
    """
    found = await answer(session.model, path, body)
    return found, session.model.recorder.newest

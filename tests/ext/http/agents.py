"""A server over a fake engine, and a client of it in the same process."""

from __future__ import annotations

from typing import Any

import httpx

from tests.model.fake import FakeEngine
from trireme.experience import Experience
from trireme.ext.http.app import create_app
from trireme.ext.http.rollouts import Rollouts
from trireme.ext.http.sessions import Sessions
from trireme.model.chat_tokens import ChatTokens


class Shipped:
    """What was committed, commit by commit."""

    def __init__(self) -> None:
        self.commits: list[list[Experience]] = []

    async def __call__(self, experiences: list[Experience]) -> None:
        self.commits.append(experiences)


def make_rollouts(replies: Any, wait: float = 0.0) -> Rollouts:
    engine: Any = FakeEngine(replies, wait=wait)
    return Rollouts(engine, ChatTokens(engine.tokenizer), "fake", 4000)


def make_client(
    rollouts: Rollouts, sessions: Sessions, key: str | None = None
) -> httpx.AsyncClient:
    app = create_app(rollouts, key=key, sessions=sessions)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def asks(text: str) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": text}]}

"""An OpenAI API of someone else's, which adds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest


class Api(BaseHTTPRequestHandler):
    """Adds two numbers, of which the first stands in the question; every second time wrongly."""

    asked: ClassVar[list[dict[str, Any]]] = []
    status: ClassVar[int] = 200
    """Of the answers after the first three."""
    refused: ClassVar[str] = ""
    """A field that gets a 400."""
    calls: ClassVar[list[dict[str, Any]]] = []
    """In place of an answer to a user."""
    said: ClassVar[str | None] = None
    """What stands before the calls."""
    told: ClassVar[int | None] = None
    """How many tokens each answer says that it has."""

    failed: ClassVar[dict[str, Any] | None] = None
    """Stands in each answer in place of its choices, with status 200."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body | {"key": self.headers["authorization"]})
        users = [m["content"] for m in body["messages"] if m["role"] == "user"]
        first = int(users[-1].split()[0])
        reply = f"\\boxed{{{first + 1 + len(self.asked) % 2}}}"
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop",
                  "message": {"role": "assistant", "content": reply}}  # fmt: skip
        if self.calls and body["messages"][-1]["role"] == "user":
            choice["message"] = {
                "role": "assistant",
                "content": self.said,
                "tool_calls": self.calls,
            }
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
                  "choices": [choice]}  # fmt: skip
        if self.told is not None:
            used = {"prompt_tokens": 9, "completion_tokens": self.told, "total_tokens": 9}
            answer["usage"] = used
        if self.failed is not None:
            answer |= {"choices": None} | self.failed
        data = json.dumps(answer).encode()
        if self.refused in body:
            data = json.dumps({"error": {"message": f"'{self.refused}' is not supported"}}).encode()
            self.send_response(400)
        else:
            self.send_response(200 if len(self.asked) < 4 else self.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Api, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()

"""Fuzz: requests that nobody thought of, made from good ones and from the API's own description.

A case is one request to a live server. After each the server has to be well: a good request gives
the tokens that it gave before, and no answer is a 5xx but 503.
"""

from __future__ import annotations

import copy
import json
import re
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.ext.http import bad
from tests.limits import HANG_S

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": [5, 6], "max_tokens": 2, "stop": ["x"], "top_k": 3, "logprobs": 1},
        {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "seed": 1, "min_tokens": 1},
        {"prompt": "ab", "max_tokens": 2, "stream": True, "stream_options": {}, "top_p": 0.5},
    ],
    "/v1/chat/completions": [
        {"messages": bad.HI, "max_tokens": 2, "tools": [{"type": "function", "function": {}}]},
        {"messages": bad.HI, "max_tokens": 2, "stream": True, "logprobs": True, "top_logprobs": 2},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 2},
    ],
    "/s/one/v1/chat/completions": [{"messages": bad.HI, "max_tokens": 2, "temperature": 0.5}],
    "/v1/messages": [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "x", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": "y"}],
                },
            ],
            "max_tokens": 2,
            "system": "s",
            "tools": [{"name": "x", "input_schema": {}}],
            "stop_sequences": ["q"],
        },
        {"messages": bad.HI, "max_tokens": 2, "stream": True, "tool_choice": {"type": "auto"}},
    ],
    "/v1/messages/count_tokens": [{"messages": bad.HI, "system": [{"type": "text", "text": "s"}]}],
    "/v1/responses": [
        {"input": "a", "max_output_tokens": 2, "instructions": "i", "metadata": {"a": "b"}},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
                {"type": "function_call_output", "call_id": "1", "output": "o"},
            ],
            "max_output_tokens": 2,
            "stream": True,
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
        },
    ],
    "/feedback": [{"reward": 1.0, "session_id": "one", "task_id": "t", "run_id": 0}],
    "/commit": [{"session_id": "two"}, {"task_id": "u"}],
    "/infer/": [
        {
            "infer_requests": [{"messages": bad.HI, "uuid": "u", "data_dict": {}}],
            "request_config": {"max_tokens": 2, "temperature": 0.5, "stop": ["x"], "top_k": 3},
            "key": [1, 2, 3],
        }
    ],
    "/generate/": [{"prompts": ["a", "b"], "n": 2, "max_tokens": 2, "top_k": 2}],
    "/chat/": [{"messages": [bad.HI], "max_tokens": 2, "min_p": 0.1}],
    "/engine/generate": [
        {"ids": [5, 6], "sampling": {"max_tokens": 2, "stop_token_ids": [3]}, "key": [1, [2], "a"]}
    ],
    "/engine/stream": [
        {"id": "s", "requests": [{"ids": [5], "sampling": {"max_tokens": 2}, "key": [1]}] * 2}
    ],
    "/engine/cancel": [{"id": "s", "index": 0}],
    "/engine/logprobs": [{"ids": [[5, 6], [7]], "temperature": 1.0}],
    "/engine/weights/commit": [{"version": 1, "path": "/nowhere"}],
    "/engine/group/commit": [{"version": 1}],
    "/engine/abort": [{"key": [9, 9, 9, 9]}],
    "/update_weights_from_path/": [{"path": "/nowhere"}],
}
"""Good requests, mostly, by their path."""

NOT_DRAWN = ("/engine/pause", "/engine/resume", "/init_communicator/", "/engine/group/")
NOT_DRAWN += ("/update_", "/engine/weights", "/s/{name}", "/engine/abort")
"""Of the API's description: what stops others rightly, opens ports, or waits for a trainer."""

NUMBERS = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 1.5, -0.0, 1e-300, 1e300]),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
)
TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "\ud800", "\0", "a" * 5000, "<|im_end|>"])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["n", "stop", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "ignore_eos", "odd"]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a body."""
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return [path, *(p for key, inner in items for p in places(inner, (*path, key)))]


@st.composite
def requests(draw: Any) -> tuple[str, bytes]:
    """A path, and a good body of it that was changed in one to three places."""
    path = draw(st.sampled_from(sorted(BODIES)))
    body: Any = {"": copy.deepcopy(draw(st.sampled_from(BODIES[path])))}
    for _ in range(draw(st.integers(1, 3))):
        *outer, last = draw(st.sampled_from(places(body)[1:] or [("",)]))
        owner = body
        for key in outer:
            owner = owner[key]
        match draw(st.sampled_from(["replace", "drop", "add", "nest"])):
            case "replace":
                owner[last] = draw(VALUES)
            case "drop" if outer:
                del owner[last]
            case "add" if isinstance(owner[last], dict):
                owner[last][draw(st.one_of(KEYS, TEXTS))] = draw(VALUES)
            case "nest":
                for _ in range(draw(st.sampled_from([1, 3, 90]))):
                    owner[last] = [owner[last]]
    return path, json.dumps(body.get("")).encode()


@dataclass
class Target:
    """A server that is fuzzed, and what it said."""

    client: httpx.Client
    before: list[int] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.before = self.good()

    def good(self) -> list[int]:
        answer = self.client.post("/v1/completions", json=bad.GOOD)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def judge(self, status: int, what: Any, text: str) -> None:
        """Of one case; then whether all is well still."""
        self.statuses[status] += 1
        assert status < 500 or status == 503, (status, what, text[:500])
        assert self.good() == self.before, what


def _settings(count: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )


def fuzz_bodies(target: Target, count: int) -> None:
    """So many requests made from good ones."""

    @_settings(count)
    @given(requests())
    def one(request: tuple[str, bytes]) -> None:
        path, body = request
        headers = {"content-type": "application/json"}
        answer = target.client.post(path, content=body, headers=headers)
        target.judge(answer.status_code, request, answer.text)

    one()


@st.composite
def wires(draw: Any) -> bytes:
    """What a client writes to a connection: requests that were changed in their bytes and lines."""
    lines = draw(st.sampled_from([data for _, data, _ in bad.WIRE if len(data) < 1000]))
    parts = lines.splitlines(keepends=True)
    others = [line for _, data, _ in bad.WIRE if len(data) < 1000 for line in data.splitlines(True)]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(parts)))
        match draw(st.sampled_from(["line", "bytes", "drop", "twice", "end"])):
            case "line":
                parts.insert(at, draw(st.sampled_from(others)))
            case "bytes":
                parts.insert(at, draw(st.binary(max_size=9)))
            case "drop":
                del parts[at : at + 1]
            case "twice":
                parts[at:at] = parts[at : at + 1]
            case "end":
                parts[at : at + 1] = [b"".join(parts[at : at + 1])[:-1] + b"\n"]
    return b"".join(parts)


def fuzz_wire(target: Target, count: int) -> None:
    """So many connections on which something else than requests is written."""
    host, port = target.client.base_url.host, target.client.base_url.port or 80

    @_settings(count)
    @given(wires())
    def one(data: bytes) -> None:
        text = b""
        with (
            suppress(OSError),
            socket.create_connection((host, port), timeout=HANG_S) as connection,
        ):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(2**16):
                text += piece
        statuses = re.findall(rb"HTTP/1\.1 (\d+) ", text)
        for status in map(int, statuses or [b"0"]):
            target.judge(status, data, text.decode("latin-1"))

    one()


def fuzz_description(target: Target, count: int) -> None:
    """About so many requests made from the server's OpenAPI description."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(target.client.get("/openapi.json").json())
    found: list[Any] = list(schema.get_all_operations())
    operations = [o for o in (one.ok() for one in found) if not o.path.startswith(NOT_DRAWN)]
    for operation in operations:

        @_settings(max(count // len(operations), 1))
        @given(case=operation.as_strategy())
        def one(case: Any) -> None:
            answer = case.call(base_url=str(target.client.base_url), timeout=HANG_S)
            target.judge(answer.status_code, (case.method, case.path, case.body), answer.text)

        one()

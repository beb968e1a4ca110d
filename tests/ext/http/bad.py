"""Requests that no server may serve, over the APIs that have them: each was, or could be, the end
of an engine that others use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
GOOD: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 6, "ignore_eos": True}

OPTIONS: Sequence[tuple[str, Any]] = (
    *(("temperature", value) for value in ("hot", -1, 1e-30, 1e30, True, [1], {})),
    *(("top_p", value) for value in ("1", 0, 1.5, -0.5)),
    *(("top_k", value) for value in ("5", 2.5, -7, 10**30)),
    *(("min_p", value) for value in ("0", 2, -1)),
    *(("repetition_penalty", value) for value in ("1", 0, -2, 1e-300, 1e300)),
    *(("max_tokens", value) for value in ("9", 0, -1, 1.5, 10**30)),
    *(("min_tokens", value) for value in ("9", -1, 1.5, 10**30)),
    *(("n", value) for value in ("2", 0, 1.5, 10**6)),
    *(("stop", value) for value in (5, [5], [""], "", [["a"]], {"a": 1}, ["x"] * 1000)),
    *(("stop_token_ids", value) for value in ("ab", [-1], [10**6], ["5"], [1.5], 5)),
    *(("seed", value) for value in ("1", 1.5, 10**30, [1])),
    *(("ignore_eos", value) for value in ("yes", 1)),
)
"""Options with values of other types and ranges, of every API that takes them under these names."""

PROMPTS: Sequence[tuple[str, Any]] = (
    *(("prompt", value) for value in ([10**6], [5, -1], [2**70], [1.5], [True, "a"], {}, 7, None)),
    *(("logprobs", value) for value in (-1, "many", 10**6, 1.5)),
    ("prompt", ["a"] * 1025),
    *(("best_of", 3), ("echo", True), ("stream", "yes"), ("stream_options", [1])),
)
CHATS: Sequence[tuple[str, Any]] = (
    *(("messages", value) for value in ("hi", [], [5], [{}], [{"role": 5, "content": "a"}], None)),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [5]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [*HI, {"role": "assistant", "content": "", "tool_calls": [5]}]),
    *(("tools", value) for value in (5, [5], ["look"])),
    *(("top_logprobs", value) for value in (-1, 10**6, "3")),
    *(("logprobs", 3), ("stream", 1), ("stream_options", [1]), ("tool_choice", "required")),
)
MESSAGES: Sequence[tuple[str, Any]] = (
    *(("messages", value) for value in ("hi", [], [5], [{}], [{"role": "user", "content": 5}])),
    ("messages", [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "tool_use", "name": "x"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    *(("system", value) for value in (5, [5], [{"type": "image"}])),
    *(("tools", value) for value in (5, [5], [{"name": 5, "input_schema": {}}])),
    *(("tool_choice", value) for value in (5, {"type": "any"})),
    *(("stop_sequences", value) for value in (5, [5], [""])),
)
RESPONSES: Sequence[tuple[str, Any]] = (
    *(("input", value) for value in (5, None, [5], [{"type": "image"}], [{"content": [5]}])),
    ("input", [{"type": "function_call", "name": "x"}]),
    ("input", [{"type": "function_call_output", "output": 5}]),
    *(("instructions", 5), ("previous_response_id", 5), ("metadata", 5), ("tools", [5])),
    *(("tools", [{"type": "function"}]), ("max_output_tokens", "9"), ("max_output_tokens", 0)),
)


def agents_requests() -> list[tuple[str, dict[str, Any]]]:
    """A path and a body for each, of the APIs that agents speak."""
    text, chat = {"prompt": "ab", "max_tokens": 2}, {"messages": HI, "max_tokens": 2}
    both = ("temperature", "top_p")
    found = [("/v1/completions", text | {name: value}) for name, value in (*OPTIONS, *PROMPTS)]
    found += [("/v1/chat/completions", chat | {n: v}) for n, v in (*OPTIONS, *CHATS)]
    shared = [(name, value) for name, value in OPTIONS if name in (*both, "max_tokens", "top_k")]
    found += [("/v1/messages", chat | {n: v}) for n, v in (*shared, *MESSAGES)]
    shared = [(name, value) for name, value in OPTIONS if name in both]
    found += [("/v1/responses", {"input": "ab", name: v}) for name, v in (*shared, *RESPONSES)]
    return found


def trainers_requests() -> list[tuple[str, dict[str, Any]]]:
    """Those of ms-swift's and TRL's APIs, and of the engine's own."""
    infer = [{"messages": HI}]
    found: list[tuple[str, dict[str, Any]]] = []
    for name, value in OPTIONS:
        options = {"max_tokens": 2, name: value}
        found.append(("/engine/generate", {"ids": [5], "sampling": options}))
        found.append(("/infer/", {"infer_requests": infer, "request_config": options}))
    typed = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "n")
    for name, value in OPTIONS:
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if name in typed and numeric:
            found.append(("/generate/", {"prompts": ["ab"], "max_tokens": 2, name: value}))
            found.append(("/chat/", {"messages": [HI], "max_tokens": 2, name: value}))
    found += [("/engine/generate", {"ids": ids}) for ids in ([10**6], [-1], ["x"], [], [5] * 9999)]
    found += [("/engine/logprobs", {"ids": [ids]}) for ids in ([10**6], [-1], [5] * 9999, [])]
    found += [("/engine/logprobs", {"ids": [[5]], "temperature": t}) for t in (-1, "x", 1e30)]
    found += [
        ("/generate/", {"prompts": [[10**6]]}),
        ("/generate/", {"prompts": ["a"] * 100, "n": 1000}),
        ("/v1/completions", {"prompt": ["a"] * 100, "n": 1000}),
        ("/v1/completions", {"prompt": "ab", "odd": 1}),  # agents may send keys that we do not know
        ("/engine/stream", {"id": "x", "requests": [{"ids": [5], "sampling": {"n": 1024}}] * 17}),
        ("/engine/generate", {"ids": [5], "key": [1, [2, [{}]]]}),
        ("/engine/abort", {"key": [{}]}),
        ("/infer/", {"infer_requests": infer, "key": [1, {}]}),
        ("/engine/cancel", {"id": "x", "index": -1}),
        ("/engine/weights/commit", {"version": -1}),
        ("/engine/weights/commit", {"version": 1, "path": "/nowhere"}),
        ("/engine/group/commit", {"version": -1}),
        ("/engine/group/receive", {}),
        ("/engine/group/join", {"host": "127.0.0.1", "port": 9, "world_size": 2, "rank": 0}),
        ("/init_communicator/", {"host": "no such host", "port": 9}),
        ("/init_communicator/", {"host": "127.0.0.1", "port": 0}),
        ("/update_named_param/", {"name": "w", "dtype": "float32", "shape": [-1]}),
        ("/update_named_param/", {"name": "w", "dtype": "float32", "shape": [2**20, 2**20]}),
        ("/update_named_param/", {"name": "w", "dtype": "nonsense", "shape": [1]}),
        ("/update_weights_from_path/", {"path": "/nowhere"}),
        *(
            ("/infer/", {"infer_requests": [{"messages": HI, name: ["x.png"]}]})
            for name in ("images", "audios", "videos")
        ),
    ]
    return found


RAW = (
    b"{",
    b"",
    b"[1]",
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "\\ud800"}',
    b'{"\\udfff": 1, "prompt": "a"}',
    b"[" * 5000 + b"]" * 5000,
    b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    b"\xff\xfe",
)
"""Bodies that are no JSON, or hold what no field may."""


def raw_requests() -> list[tuple[str, bytes]]:
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
    return [(path, body) for path in paths for body in RAW]


def refused(answer: httpx.Response) -> str:
    """The sentence of a 4xx; fails for any other answer."""
    sent = answer.request.content[:300]
    assert 400 <= answer.status_code < 500, (answer.request.url.path, sent, answer.text)
    message = json.loads(answer.content)["error"]["message"]
    assert message and "\n" not in message and len(message) < 1200, message
    return message


_GOOD = b'{"prompt": [5], "max_tokens": 1}'
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_LENGTH = b"Content-Length: %d\r\n" % len(_GOOD)
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_CHUNKS = b"%x\r\n" % len(_GOOD) + _GOOD + b"\r\n0\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HIDDEN = b"GET /engine/health HTTP/1.1\r\nHost: localhost\r\n\r\n"

WIRE: Sequence[tuple[str, bytes, list[int]]] = (
    ("a good one", _HEAD + _LENGTH + b"\r\n" + _GOOD, [200]),
    ("a good one in chunks", _HEAD + _CHUNKED + b"\r\n" + _CHUNKS, [200]),
    ("two behind each other", HEALTH + _HEAD + _LENGTH + b"\r\n" + _GOOD + HEALTH, [200] * 3),
    ("a body that waits to be asked for", _HEAD + _LENGTH + b"Expect: 100-continue\r\n\r\n" + _GOOD,
     [100, 200]),
    ("one that waits and is too large", _HEAD + b"Content-Length: 99999999999\r\n"
     b"Expect: 100-continue\r\n\r\n", [413]),
    ("two lengths", _HEAD + _LENGTH + b"Content-Length: 3\r\n\r\n" + _GOOD + HIDDEN, [400]),
    ("a length and chunks", _HEAD + _LENGTH + _CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN, [400]),
    ("chunks and a length", _HEAD + _CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n" + HIDDEN,
     [400]),
    ("chunks with a space before the colon", _HEAD + b"Transfer-Encoding : chunked\r\n" + _LENGTH
     + b"\r\n" + _GOOD + HIDDEN, [400]),
    ("another coding", _HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN, [400]),
    ("a length below 0", _HEAD + b"Content-Length: -1\r\n\r\n" + _GOOD, [400]),
    ("a length that is none", _HEAD + b"Content-Length: 1e3\r\n\r\n" + _GOOD, [400]),
    ("a length with a sign", _HEAD + b"Content-Length: +32\r\n\r\n" + _GOOD, [400]),
    ("a chunk without a size", _HEAD + _CHUNKED + b"\r\nxyz\r\n", [400]),
    ("a chunk of 16 exabytes", _HEAD + _CHUNKED + b"\r\nffffffffffffffff\r\n" + _GOOD, []),
    ("a chunk that ends elsewhere", _HEAD + _CHUNKED + b"\r\n3\r\nabcdef\r\n0\r\n\r\n", [400]),
    ("a header over two lines", _HEAD + b"X: a\r\n  Content-Length: 3\r\n" + _LENGTH + b"\r\n"
     + _GOOD, [200]),
    ("a NUL in a header", _HEAD + b"X: a\0b\r\n\r\n", [400]),
    ("no host", b"GET /v1/models HTTP/1.1\r\n\r\n", [400]),
    ("two hosts", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", [400]),
    ("100,000 headers", _HEAD + b"X: y\r\n" * 100_000 + b"\r\n", [400]),
    ("a header of a megabyte", _HEAD + b"X: " + b"y" * 2**20 + b"\r\n\r\n", [400]),
    ("a path of a megabyte", b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
     [400]),
    ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400]),
    ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [403, 400]),
    ("an upgrade", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
     b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eHg=\r\n\r\n", [200]),
)  # fmt: skip
"""What a client may write to a connection, and the statuses of all that it is answered."""

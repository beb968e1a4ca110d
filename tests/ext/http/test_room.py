"""What a body holds is known before it is read: counted in its bytes, whatever its texts hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ext.http import bad
from tests.ext.http.made import client_of
from tests.ext.http.test_limits import fake_rollouts
from tests.limits import HANG_S
from trireme.ext.http import room
from trireme.ext.http.room import NoRoom, Room, look_inside

TEXTS = st.one_of(st.text(max_size=6), st.text(alphabet='\\"[{,:}]a', max_size=9))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=20,
)
MANY = Room(10**9, values=10**9, keys=10**9, lists=10**9)


def nodes(value: Any, depth: int = 0) -> Iterator[tuple[Any, int]]:
    """Each value in another, with the lists and objects that it is in."""
    yield value, depth
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for one in inner:
            yield from nodes(one, depth + 1)


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(JSON, st.booleans(), st.sampled_from([1, 2, 3, 7, 2**18]))
def test_the_count_is_that_of_the_parsed_body_wherever_its_pieces_end(
    value: Any, escaped: bool, piece: int
) -> None:
    body = json.dumps(value, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    found = list(nodes(value))
    lists = sum(isinstance(one, list | dict) for one, _ in found)
    keys = sum(len(one) for one, _ in found if isinstance(one, dict))
    commas = sum(max(len(one) - 1, 0) for one, _ in found if isinstance(one, dict | list))
    depth = max(at + isinstance(one, list | dict) for one, at in found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "PIECE", piece)
        patch.setattr(room, "DEEPEST", depth)
        exact = Room(len(body), values=commas + 1, keys=keys, lists=lists)
        look_inside(body, exact)
        fewer = [Room(0, values=commas, keys=keys, lists=lists)]
        fewer += [Room(0, values=commas + 1, keys=keys - 1, lists=lists)] * bool(keys)
        fewer += [Room(0, values=commas + 1, keys=keys, lists=lists - 1)] * bool(lists)
        for less in fewer:
            with pytest.raises(NoRoom, match="expected at most"):
                look_inside(body, less)
        if depth:
            patch.setattr(room, "DEEPEST", depth - 1)
            with pytest.raises(NoRoom, match="nested too deeply"):
                look_inside(body, MANY)


def test_a_body_that_is_no_json_is_left_to_its_reader() -> None:
    for body in (b"", b"]" * 10**6, b'"', b"\\" * 10**6, b'{"a": "' + b"\\" * 10**6, b"\xff\xfe"):
        look_inside(body, MANY)


CHAT = "/v1/chat/completions"


def hostile() -> list[tuple[str, bytes, int, str]]:
    """A path, a body of each kind that is refused, its status and what is said of it."""
    message = b'{"role":"user","content":"a"}'
    chat, infer = b'{"messages": %s}', b'{"infer_requests": [{"messages": %s}]}'

    def many(item: bytes, count: int) -> bytes:
        return b"[" + b",".join([item] * count) + b"]"

    long = b'"' + b"a" * 3_000_000 + b'"'
    said = b'[{"role": "user", "content": %s}]'
    keys = b"{" + b",".join(b'"k%d":1' % n for n in range(70_000)) + b', "messages": 1}'
    parts = b'[{"role": "user", "content": %s}]' % many(b'{"type":"image_url"}', 40_000)
    return [
        (CHAT, chat % many(message, 60_000), 413, "holds"),
        ("/s/a/v1/messages", chat % many(message, 60_000), 413, "holds"),
        ("/v1/responses", b'{"input": %s}' % many(message, 60_000), 413, "holds"),
        ("/infer/", infer % many(message, 140_000), 413, "lists and objects"),
        (CHAT, chat % many(message, 5000), 400, "at most 4096 items"),
        ("/v1/messages", chat % many(message, 5000), 400, "at most 4096 items"),
        ("/v1/responses", b'{"input": %s}' % many(message, 5000), 400, "at most 4096 items"),
        ("/infer/", infer % many(message, 5000), 400, "5000 messages and 0 tools: expected"),
        ("/chat/", b'{"messages": [%s]}' % many(message, 5000), 422, "at most 4096 items"),
        (CHAT, b'{"messages": %s, "tools": %s}' % (said % b'"a"', many(b"{}", 1025)), 400, "1024"),
        (CHAT, chat % (said % (b'"' + b"a" * 6_000_000 + b'"')), 413, "bytes or more"),
        ("/infer/", infer % (said % long), 400, "over the context length: expected at most"),
        ("/chat/", b'{"messages": [%s]}' % (said % long), 400, "over the context length"),
        ("/generate/", b'{"prompts": [%s]}' % long, 400, "over the context length"),
        ("/v1/completions", b'{"prompt": [%s]}' % long, 400, "over the context length"),
        (CHAT, keys, 413, "keys"),
        (CHAT, b'{"messages": %s, "%s": 1}' % (said % b'"a"', b"k" * 101), 400, "a key of 101 ch"),
        ("/v1/completions", b'{"prompt": %s}' % many(b"5", 2_100_000), 413, "values"),
        ("/engine/generate", b'{"ids": %s}' % many(b'"x"', 90_000), 422, "ids.0: Input should"),
        (CHAT, chat % parts, 413, "lists and objects"),
        (CHAT, b'{"stop": %s, "messages": %s}' % (many(b'"a"', 60_000), said % b'"a"'), 400, "64"),
        (CHAT, b'{"messages": ' + b"[" * 101 + b"]" * 101 + b"}", 413, "nested too deeply"),
        (CHAT, '{"messages": []}'.encode("utf-16"), 400, "is not JSON"),
    ]  # fmt: skip


@pytest.mark.extension("rollout_server")
def test_what_no_request_needs_is_refused_in_one_sentence() -> None:
    async def main() -> None:
        async with client_of(fake_rollouts()) as client:
            for path, body, status, message in hostile():
                headers = {"content-type": "application/json"}
                answer = await client.post(path, content=body, headers=headers)
                what = (path, body[:80], answer.text[:300])
                assert answer.status_code == status, what
                assert message in bad.refused(answer), what
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200

    asyncio.run(main())


def test_what_a_prompt_holds_is_forgotten_with_its_request() -> None:
    """A long one is not remembered for others."""
    rollouts = fake_rollouts()

    async def main() -> None:
        async with client_of(rollouts) as client:
            for size in (10, 200_000):
                message = {"role": "user", "content": "a" * size}
                answer = await client.post(CHAT, json={"messages": [message]})
                assert answer.status_code == 200, answer.text
        chat: Any = rollouts.chat
        assert chat._render_once.cache_info().currsize == 1
        assert chat._encode_prompt.cache_info().currsize == 1

    asyncio.run(main())


def test_work_on_a_large_body_that_waits_its_turn_ends_with_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import threading

    from tests.ext.http.made import on_port, until
    from trireme.ext.http import bodies

    begun: list[int] = []
    hold = threading.Event()
    read_json = bodies.read_json

    def slow(body: bytes) -> Any:
        begun.append(len(body))
        hold.wait(HANG_S)
        return read_json(body)

    monkeypatch.setattr(bodies, "read_json", slow)

    async def main() -> None:
        from concurrent.futures import ThreadPoolExecutor

        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        async with on_port(fake_rollouts()) as url, httpx.AsyncClient(base_url=url) as client:
            body = {"prompt": [5] * 100_000}
            first, second = (
                asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(2)
            )
            await until(lambda: len(begun) == 1)
            await asyncio.sleep(0.1)
            second.cancel()
            first.cancel()
            await asyncio.sleep(0.3)
            hold.set()
            await asyncio.sleep(0.3)
            assert len(begun) == 1, "the other one's client had gone before its turn came"

    asyncio.run(main())

"""Who is let in, how much at once, and what is said to the others."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.ext.http.made import client_of, on_port, rollouts_over, torch_rollouts
from tests.limits import HANG_S
from tests.model.fake import TOKENIZER, FakeEngine
from trireme.ext.http import room
from trireme.ext.http.limits import WrongKeys, short_key

LONG = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True}


def fake_rollouts(wait: float = 0.0) -> Any:
    return rollouts_over(FakeEngine(lambda _: "a", wait=wait), TOKENIZER)


def test_without_its_key_a_server_answers_nothing_but_its_health() -> None:
    async def main() -> None:
        async with client_of(fake_rollouts(), key="secret") as client:
            assert (await client.get("/health")).status_code == 200
            for headers in ({}, {"authorization": "Bearer no"}, {"x-api-key": "s\xe9cret"}):
                raw = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
                refused = await client.get("/v1/models", headers=raw)
                assert refused.status_code == 401
                assert "requires its key" in refused.json()["error"]["message"]
            shown = ("Bearer secret", "bearer secret", "BEARER  secret ")
            known = [*({"authorization": text} for text in shown), {"x-api-key": "secret"}]
            for headers in known:
                assert (await client.get("/v1/models", headers=headers)).status_code == 200

    asyncio.run(main())


def test_wrong_keys_wait_ever_longer_and_the_right_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WrongKeys, "FIRST_S", 0.25)
    monkeypatch.setattr(WrongKeys, "MOST_S", 0.5)

    async def main() -> None:
        async with client_of(fake_rollouts(), key="secret") as client:

            async def ask(key: str) -> int:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                return (await client.get("/v1/models", headers=headers)).status_code

            free = [await ask(f"guess {n}") for n in range(WrongKeys.FREE)]
            assert free == [401] * WrongKeys.FREE
            guesses = [asyncio.ensure_future(ask(f"more {n}")) for n in range(4)]
            await asyncio.sleep(0.1)
            assert (await ask("secret"), await ask("")) == (200, 401)  # no key is no guess
            assert not any(guess.done() for guess in guesses)
            await asyncio.wait(guesses, return_when=asyncio.FIRST_COMPLETED)
            assert not all(guess.done() for guess in guesses), "one behind the other"
            assert await asyncio.gather(*guesses) == [401] * 4

    asyncio.run(main())


def test_what_is_remembered_of_wrong_keys_is_bounded_and_fades() -> None:
    now = 0.0
    wrong = WrongKeys(clock=lambda: now)
    waits = [wrong.seconds("a") for _ in range(WrongKeys.FREE + 12)]
    assert waits[: WrongKeys.FREE] == [0.0] * WrongKeys.FREE
    assert waits[WrongKeys.FREE] == pytest.approx(0.2)
    assert waits == sorted(waits) and waits[-1] < 13 * WrongKeys.MOST_S
    assert wrong.seconds("b") == 0
    now += 6 * WrongKeys.HALF_S
    assert wrong.seconds("a") == 0
    for number in range(2 * WrongKeys.MOST_ADDRESSES):
        wrong.seconds(str(number))
    assert len(wrong) == WrongKeys.MOST_ADDRESSES


def test_a_key_that_can_be_guessed_is_noted() -> None:
    assert "has 6 characters" in (short_key("secret") or "")
    assert short_key(None) is None and short_key("0123456789abcdef") is None


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused(
    monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    monkeypatch.setattr(room, "MAX_BODY", 1000)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async def main() -> None:
        async with client_of(fake_rollouts()) as client:
            for path in ("/infer/", "/v1/chat/completions"):
                body = b" " * 2000 if announced else parts()
                refused = await client.post(path, content=body)
                assert refused.status_code == 413, path
                assert "expected at most 1000" in refused.json()["error"]["message"]
            kept = await client.post("/engine/weights", content=b" " * 2000)
            assert kept.status_code != 413

    asyncio.run(main())


@pytest.mark.extension("remote")
def test_a_picture_of_any_size_that_is_read_arrives() -> None:
    async def main() -> list[int]:
        async with client_of(fake_rollouts()) as client:
            body = {"digest": "0" * 64, "tokens": 1, "grid": [1, 2, 2]}
            sizes = (32 * 2**20, 34 * 2**20)  # the most of a file, and more
            data = (base64.b64encode(bytes(size)).decode() for size in sizes)
            sent = [await client.post("/engine/pictures", json=body | {"data": d}) for d in data]
            return [answer.status_code for answer in sent]

    assert asyncio.run(main()) == [200, 413]


@pytest.mark.extension("rollout_server")
@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/infer/", {}, 422, "the request's infer_requests: Field required"),
        ("/infer/", {"infer_requests": [{"messages": 3}]}, 422, "infer_requests.0.messages: "),
        ("/engine/generate", {"ids": ["x"]}, 422, "the request's ids.0: "),
        ("/engine/generate", {"ids": [1], "sampling": {"topp": 1}}, 400, "no option 'topp'"),
        ("/infer/", {"infer_requests": [], "request_config": {"n": 2}}, 400, "request_config.n is"),
        ("/v1/chat/completions", {"messages": "x"}, 400, "messages: Input should be a valid list"),
        ("/v1/chat/completions", {"messages": [{}]}, 400, "a message must be a dict"),
        ("/v1/chat/completions", b"no json", 400, "is not JSON"),
        ("/v1/chat/completions", [], 400, "must be a JSON object"),
        ("/infer/", b"no json", 400, "is not JSON"),
        ("/v1/nothing", {}, 404, "Not Found: /v1/nothing is not served here; GET /docs lists"),
        ("/chat/completions", {}, 404, "the base URL of OpenAI's clients ends in /v1, and /chat/"),
        ("/health", {}, 405, "Method Not Allowed"),
        ("/feedback", {"reward": 1, "session_id": "x"}, 400, "session 'x' is not known"),
        ("/update_named_param/", {"name": "w", "dtype": "f", "shape": [1]}, 400, "dtype 'f' is"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong_in_one_form(
    path: str, body: Any, status: int, message: str
) -> None:
    async def main() -> None:
        async with client_of(fake_rollouts()) as client:
            sent: Any = {"json": body}
            if isinstance(body, bytes):
                sent = {"content": body, "headers": {"content-type": "application/json"}}
            answer = await client.post(path, **sent)
            assert answer.status_code == status, answer.text
            assert message in answer.json()["error"]["message"]

    asyncio.run(main())


def test_a_thousand_requests_at_once_are_served_or_refused_and_none_is_lost(
    tiny_dir: Path,
) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, client_of(rollouts, most=600) as client:
            body = {"prompt": "ab", "max_tokens": 2}
            calls = [client.post("/v1/completions", json=body) for _ in range(1000)]
            answers = await asyncio.gather(*calls)
            codes = [answer.status_code for answer in answers]
            assert codes.count(200) == 600 and codes.count(429) == 400
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert refused.headers["retry-after"] == "1"
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert rollouts.engine.health().running == 0

    asyncio.run(main())


@pytest.mark.extension("remote")
def test_many_requests_over_a_port_are_all_served(tiny_dir: Path) -> None:
    import httpx

    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, on_port(rollouts) as url:
            pool = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, timeout=HANG_S, limits=pool) as client:
                body = {"ids": [5, 6], "sampling": {"max_tokens": 2, "ignore_eos": True}}
                calls = [client.post("/engine/generate", json=body) for _ in range(300)]
                answers = await asyncio.gather(*calls)
                assert all(len(a.json()[0]["ids"]) == 2 for a in answers)

    asyncio.run(main())

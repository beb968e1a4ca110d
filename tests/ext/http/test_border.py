"""The border: what is wrong with a request is a 4xx that names it, and nobody else notices."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save

from tests.ext.http import bad
from tests.ext.http.made import client_of, command, on_port, torch_rollouts, until
from tests.ext.http.test_limits import fake_rollouts
from tests.limits import HANG_S
from trireme.ext.http import bodies, limits
from trireme.ext.http.sessions import Sessions

JSON = {"content-type": "application/json"}
TENSORS = {"content-type": "application/octet-stream"}


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server behind a port."""
    async with (
        torch_rollouts(folder) as rollouts,
        on_port(rollouts) as url,
        httpx.AsyncClient(base_url=url, timeout=HANG_S) as client,
    ):
        yield client


async def good(client: httpx.AsyncClient) -> list[int]:
    answer = await client.post("/v1/completions", json=bad.GOOD)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize("serve", [False, True], ids=["rollout", "serve"])
def test_no_bad_request_reaches_the_engine(tiny_dir: Path, serve: bool) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts:
            sessions = Sessions(rollouts.session_model) if serve else None
            async with client_of(rollouts, sessions=sessions) as client:
                before = await good(client)
                requests = bad.agents_requests() + ([] if serve else bad.trainers_requests())
                for path, body in requests:
                    if serve and "odd" in body:  # programs send keys of other servers
                        continue
                    bad.refused(await client.post(path, json=body))
                for path, raw in bad.raw_requests():
                    bad.refused(await client.post(path, content=raw, headers=JSON))
                assert await good(client) == before
                assert rollouts.engine.health().running == 0

    asyncio.run(main())


@pytest.mark.extension("rollout_server")
def test_bad_requests_in_the_middle_of_a_good_one_do_not_touch_it(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """At the command itself, as its users have it."""
    with command(tmp_path, tiny_dir, "--max-model-len", "256") as (process, url):
        with httpx.Client(base_url=url, timeout=HANG_S) as client:
            body = bad.GOOD | {"max_tokens": 200, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                for path, wrong in (*bad.agents_requests()[::7], *bad.trainers_requests()[::7]):
                    bad.refused(client.post(path, json=wrong))
                rest = list(lines)
            assert rest[-2] == "data: [DONE]" and not any("error" in line for line in rest)
        assert process.poll() is None
        found = psutil.Process(process.pid).net_connections(kind="inet")
        beyond = {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN} - {"127.0.0.1"}
        assert not beyond, "without a key nothing listens beyond this machine"


@pytest.mark.extension("rollout_server")
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/completions",
            {"prompt": "a", "temperature": "hot"},
            "sampling temperature is 'hot': expected 0 (greedy), or a number from 1e-06 to 100",
        ),
        ("/engine/generate", {"ids": [10**6]}, "the prompt holds the id 1000000 (at 0): expected"),
        (
            "/engine/generate",
            {"ids": [5], "key": [1, [2], {"a": 3}]},
            "key holds {'a': 3}: expected numbers, texts, or lists of them",
        ),
        (
            "/infer/",
            {"infer_requests": [{"messages": bad.HI}], "request_config": {"stop": 5}},
            "sampling stop is 5: expected at most 64 texts of 1 to 1024 characters",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "'tool_use_id' of a tool_result is None: expected text",
        ),
        (
            "/v1/chat/completions",
            {"messages": "x"},
            "the request's messages: Input should be a valid list, and it is 'x'",
        ),
    ],
)
def test_a_refusal_names_the_field_what_it_is_and_what_it_may_be(
    tiny_dir: Path, path: str, body: Any, message: str
) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, client_of(rollouts) as client:
            assert message in bad.refused(await client.post(path, json=body))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"host": "evil.example"}, 403, "Host is 'evil.example': expected localhost"),
        ({"host": "evil.example:80"}, 403, "Host is"),
        ({"origin": "https://evil.example"}, 403, "(Origin)"),
        ({"origin": "null"}, 403, "(Origin)"),
        ({"origin": "http://localhost:9"}, 403, "(Origin)"),
        ({"content-type": "text/plain"}, 415, "content-type is 'text/plain': expected app"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "content-type is"),
        ({"content-type": ""}, 415, "content-type is ''"),
        ({"host": "127.0.0.1:80"}, 200, ""),
        ({"host": "[::1]:80"}, 200, ""),
        ({"origin": "http://localhost"}, 200, ""),
        ({"content-type": "application/json; charset=utf-8"}, 200, ""),
    ],
)
def test_a_web_page_cannot_drive_a_server_of_this_machine(
    headers: dict[str, str], status: int, message: str
) -> None:
    async def main() -> None:
        async with client_of(fake_rollouts()) as client:
            body = b'{"prompt": "ab"}'
            answer = await client.post("/v1/completions", content=body, headers=JSON | headers)
            assert answer.status_code == status, answer.text
            assert message in (answer.json()["error"]["message"] if status != 200 else "")
            if headers.keys() & {"host", "origin"}:
                health = await client.get("/health", headers=headers)
                assert health.status_code == status

    asyncio.run(main())


def test_bodies_that_do_not_come_hold_no_slot_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_S", 1.0)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    async def main() -> None:
        async with on_port(fake_rollouts(), most=2) as url:
            port = int(url.rpartition(":")[2])
            slow = []
            for _ in range(8):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head + b"Content-Length: 99\r\n\r\n{")
                slow.append((reader, writer))
            await asyncio.sleep(0.2)
            async with httpx.AsyncClient(base_url=url) as client:
                served = await client.post("/v1/completions", json={"prompt": "ab"})
                assert served.status_code == 200
            for reader, writer in slow:
                answer = await asyncio.wait_for(reader.read(2000), HANG_S)
                assert b"408" in answer and b"1 bytes were received" in answer
                writer.close()

    asyncio.run(main())


def test_clients_that_leave_in_their_body_leave_no_word(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with on_port(fake_rollouts()) as url:
            port = int(url.rpartition(":")[2])
            for path in ("/v1/completions", "/infer/", "/engine/weights"):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{"
                writer.write(head.encode())
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.transport.abort()
            await asyncio.sleep(0.2)
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/health")).status_code == 200
            assert "Traceback" not in capfd.readouterr().err + caplog.text

    asyncio.run(main())


def test_a_long_text_keeps_nobody_waiting_and_a_longer_one_is_refused(tiny_dir: Path) -> None:
    async def main() -> None:
        async with served(tiny_dir) as client:
            text, longer = "ab " * 300_000, "ab " * 5_000_000
            for path, status, body in (
                ("/v1/completions", 400, lambda t: {"prompt": t}),
                ("/v1/chat/completions", 413, lambda t: {"messages": [bad.HI[0] | {"content": t}]}),
            ):
                answer = await client.post(path, json=body(text))
                assert answer.status_code == 200  # too long: an empty reply that says so
                assert answer.json()["choices"][0]["finish_reason"] == "length"
                refused = await client.post(path, json=body(longer))
                assert refused.status_code == status and "at most" in bad.refused(refused)
            many = {"prompt": "ab", "n": 1024, "max_tokens": 400, "ignore_eos": True}
            busy = asyncio.ensure_future(client.post("/v1/completions", json=many))
            for _ in range(10):
                assert (await client.get("/health")).status_code == 200
                await asyncio.sleep(0.02)
            assert not busy.done()
            busy.cancel()

    asyncio.run(main())


def test_a_large_body_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    others_are_served = threading.Event()

    def slow_read(body: bytes) -> Any:
        if len(body) > bodies.LARGE_BODY:
            assert others_are_served.wait(HANG_S)
        return read_json(body)

    read_json = bodies.read_json
    monkeypatch.setattr(bodies, "read_json", slow_read)

    async def main() -> None:
        async with client_of(fake_rollouts()) as client:
            ids = [10**6] * 2**18
            large = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": ids}))
            served = await client.post("/v1/completions", json={"prompt": "ab"})
            assert served.status_code == 200 and not large.done()
            others_are_served.set()
            answer = await large
            assert answer.status_code == 200, answer.text[:500]
            half = b'{"prompt": "' + b"a" * 2**20 + b'\\ud800"}'
            wrong = await client.post("/v1/completions", content=half, headers=JSON)
            assert "half of a surrogate pair" in bad.refused(wrong)

    asyncio.run(main())


@pytest.mark.extension("remote")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t * torch.nan, "holds NaN or an infinite number"),
        (lambda t: t / 0, "holds NaN or an infinite number"),
        (lambda t: t.long(), "is of torch.int64: expected floating point"),
    ],
)
@pytest.mark.parametrize("by", ["body", "folder"])
def test_weights_that_no_model_can_use_are_refused(
    tiny_dir: Path, tmp_path: Path, change: Any, message: str, by: str
) -> None:
    weights = {n: change(t + 1) for n, t in load_file(tiny_dir / "model.safetensors").items()}

    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, client_of(rollouts) as client:
            before = await good(client)
            if by == "body":
                answer = await client.post(
                    "/engine/weights", content=save(weights), headers=TENSORS
                )
            else:
                (tmp_path / "model.safetensors").write_bytes(save(weights))
                body = {"version": 1, "path": str(tmp_path)}
                answer = await client.post("/engine/weights/commit", json=body)
            assert answer.status_code == 400 and message in bad.refused(answer)
            assert await good(client) == before and rollouts.engine.health().version == 0

    asyncio.run(main())


@pytest.mark.extension("remote")
def test_weights_of_the_past_and_more_than_the_model_can_take_are_refused(tiny_dir: Path) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, client_of(rollouts) as client:
            commit = {"version": 7, "path": str(tiny_dir)}
            assert (await client.post("/engine/weights/commit", json=commit)).status_code == 200
            older = await client.post("/engine/weights/commit", json=commit | {"version": 6})
            assert older.status_code == 409 and "expected 7" in bad.refused(older)
            begin = commit | {"version": 0, "begin": True}
            assert (await client.post("/engine/weights/commit", json=begin)).status_code == 200
            rollouts.__dict__["max_weight_bytes"] = 1000
            for name, status in (("a", 200), ("a", 200), ("b", 413)):
                part = save({name: torch.zeros(200)})
                answer = await client.post("/engine/weights", content=part, headers=TENSORS)
                assert answer.status_code == status, answer.text
            rubbish = await client.post("/engine/weights", content=b"rubbish", headers=TENSORS)
            assert "not in the safetensors format" in bad.refused(rubbish)

    asyncio.run(main())


def test_numbers_that_are_no_json_are_our_failure(tiny_dir: Path) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, client_of(rollouts) as client:
            model: Any = rollouts.engine
            model.module.get_output_embeddings().weight.data.fill_(torch.nan)
            body = {"prompt": "ab", "max_tokens": 1, "logprobs": 0}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 500
            assert "the answer cannot be sent" in answer.json()["error"]["message"]

    asyncio.run(main())


@pytest.mark.extension("rollout_server")
def test_the_port_of_a_weight_group_is_open_at_the_asked_address_alone(tiny_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

    async def main() -> None:
        async with served(tiny_dir) as client:
            beyond = {"host": "192.0.2.1", "port": port}
            refused = await client.post("/init_communicator/", json=beyond)
            assert "expected 127.0.0.1" in bad.refused(refused)
            body = {"host": "0.0.0.0", "port": port}
            assert (await client.post("/init_communicator/", json=body)).status_code == 200
            await until(lambda: any(p == port for _, p in listeners()))
            assert {host for host, _ in listeners()} <= {"127.0.0.1"}
            # the trainer has not come, and nothing was announced: others are served
            body = {
                "infer_requests": [{"messages": bad.HI}],
                "request_config": {"max_tokens": 1},
            }
            assert (await client.post("/infer/", json=body)).status_code == 200

    asyncio.run(main())


def listeners() -> set[tuple[str, int]]:
    """Where this process listens."""
    found = psutil.Process().net_connections(kind="tcp")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


def test_keys_that_have_no_effect_are_counted_and_tokens_can_be() -> None:
    async def main() -> None:
        async with client_of(fake_rollouts()) as client:
            body = {"messages": bad.HI, "max_tokens": 5, "context_management": {}, "betas": []}
            assert (await client.post("/v1/messages", json=body)).status_code == 200
            told = await client.post("/v1/responses", json={"input": "hi", "client_metadata": {}})
            assert told.status_code == 200
            figures = (await client.get("/metrics")).text
            assert "trireme_request_keys_ignored_total 3" in figures
            counted = await client.post("/v1/messages/count_tokens", json={"messages": bad.HI})
            text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            expected = len(text) - len("<|im_start|><|im_end|><|im_start|>") + 3
            assert counted.json() == {"input_tokens": expected}

    asyncio.run(main())

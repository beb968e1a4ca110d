"""Serving: how a server begins and ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.buffer.made import experience
from trireme.checkpoint.layout import JobFolder
from trireme.experience import Experience
from trireme.ext.http import serving
from trireme.ext.http.app import AppServer


def stage(
    folder: Path, *, port: int = 0, host: str = "127.0.0.1", notes: list[str] | None = None
) -> Any:
    explorer = SimpleNamespace(proxy_port=port, service_status_check_interval=0.01)
    plan = SimpleNamespace(listen_address=host, config=SimpleNamespace(explorer=explorer))
    said: list[str] = [] if notes is None else notes
    return SimpleNamespace(
        plan=plan,
        folder=JobFolder(folder),
        model_path="model",
        emit=lambda event: said.append(event.text),
    )


def test_a_port_that_is_taken_is_told_before_anything_is_served(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(OSError, match=rf"port {port} .*set explorer.proxy_port"),
            serving._listening(stage(tmp_path, port=port)),
        ):
            pass
    assert not (tmp_path / serving.URL_FILE).exists()


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    here = stage(tmp_path)
    for _ in range(2):
        with (
            serving._alone(here),
            pytest.raises(ValueError, match="is served by another process already"),
            serving._alone(here),
        ):
            pass


def test_the_address_is_in_the_folder_while_it_is_served(tmp_path: Path) -> None:
    with serving._listening(stage(tmp_path)) as own:
        url = (tmp_path / serving.URL_FILE).read_text()
        assert url == f"http://127.0.0.1:{own.getsockname()[1]}"
    assert not (tmp_path / serving.URL_FILE).exists()


@pytest.mark.parametrize(("version", "says"), [(0, ""), (80, ", trained to version 80,")])
def test_a_server_that_is_started_again_says_which_weights_it_serves(
    version: int, says: str, tmp_path: Path
) -> None:
    notes: list[str] = []
    with serving._listening(stage(tmp_path, notes=notes), version) as own:
        url = f"http://127.0.0.1:{own.getsockname()[1]}"
    assert notes == [f"serving model{says} on {url} ({tmp_path / serving.URL_FILE})"]


async def slow(scope: Any, receive: Any, send: Any) -> None:
    """An application whose answers take a moment."""
    if scope["type"] != "http":
        return
    await asyncio.sleep(0.2)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


async def served(folder: Path, ended: asyncio.Event, *, stop: bool) -> str:
    """One request, during which the server is told to end; what came of the request."""

    async def watch() -> None:
        await ended.wait()

    with serving._listening(stage(folder)) as own:
        server = AppServer(slow, own)
        url = (folder / serving.URL_FILE).read_text()
        running = asyncio.ensure_future(server.serve(watch()))
        async with httpx.AsyncClient() as client:
            asking = asyncio.ensure_future(client.get(url))
            while not server.busy:
                await asyncio.sleep(0.005)
            server.stop() if stop else ended.set()
            text = (await asking).text
        await running
    return text


@pytest.mark.parametrize("stop", [True, False])
def test_a_stop_and_the_trainers_end_let_requests_finish(tmp_path: Path, stop: bool) -> None:
    async def main() -> str:
        return await served(tmp_path, asyncio.Event(), stop=stop)

    assert asyncio.run(main()) == "done"


def test_requests_that_a_stop_cuts_off_leave_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> int:
        with serving._listening(stage(tmp_path)) as own:
            server = AppServer(never, own, grace=1)
            logging.getLogger("uvicorn.error").addHandler(caplog.handler)
            running = asyncio.ensure_future(server.serve())
            async with httpx.AsyncClient() as client:
                asking = asyncio.ensure_future(
                    client.get((tmp_path / serving.URL_FILE).read_text())
                )
                while not server.busy:
                    await asyncio.sleep(0.005)
                server.stop()
                await running
                return (await asking).status_code

    try:
        assert asyncio.run(main()) == 500
    finally:
        logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    said = "Cancel 1 running task(s), timeout graceful shutdown exceeded"
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [(said, None)]


def test_a_commit_that_nobody_waits_for_any_more_fails_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async def put(experiences: list[Experience]) -> None:
            await asyncio.sleep(0.01)
            raise RuntimeError("the other side has failed")

        async def run(experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
            return experiences, {}

        parts: Any = {
            "pipeline": SimpleNamespace(run=run),
            "buffer": SimpleNamespace(put=put),
            "sync": None,
            "emit": None,
            "dropped": None,
        }
        intake = serving.Intake(folder=JobFolder(tmp_path), **parts)
        waiting = asyncio.ensure_future(intake.ship([experience(1, 0, 0, 1.0)]))
        await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.sleep(0.05)

    asyncio.run(main())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_server_ends_when_the_trainer_stops_or_with_its_failure(tmp_path: Path) -> None:
    class Sync:
        looks = 0

        @property
        def finished(self) -> bool:
            self.looks += 1
            return self.looks > 3

        async def load_latest(self) -> None:
            if broken:
                raise RuntimeError("wrong weights")

    async def main() -> int:
        sync: Any = Sync()
        sessions: Any = SimpleNamespace(drop_quiet=lambda: 0)
        here = stage(tmp_path)
        engine: Any = SimpleNamespace(health=lambda: None)
        with serving._listening(here) as own:
            await AppServer(slow, own).serve(serving._watch(here, engine, sync, sessions))
        return sync.looks

    broken = False
    assert asyncio.run(main()) == 4
    broken = True
    with pytest.raises(RuntimeError, match="wrong weights"):
        asyncio.run(main())

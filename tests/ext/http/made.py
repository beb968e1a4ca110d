"""Rollout servers for tests: in this process without a port, with one, or as a command."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from transformers import AutoTokenizer

from tests.e2e.job import Forked, trireme, wait_for
from tests.limits import HANG_S
from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.ext.http.app import create_app
from trireme.ext.http.connections import server_config
from trireme.ext.http.rollouts import Rollouts
from trireme.model.chat_tokens import ChatTokens

ADDRESS = re.compile(r"^serving .* on ([^\s,]+).*\n", re.MULTILINE)


@asynccontextmanager
async def torch_rollouts(
    folder: Path, *, max_model_len: int = 512, dtype: str = "float32", **options: Any
) -> AsyncIterator[Rollouts]:
    """An engine of its own and what the server makes of it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    device = Device(1)
    engine = TorchEngine(
        folder,
        tokenizer=tokenizer,
        device=device,
        settings=TorchSettings(max_model_len=max_model_len, seed=42, dtype=dtype),
    )
    try:
        yield rollouts_over(engine, tokenizer, max_model_len=max_model_len, **options)
    finally:
        await engine.close()
        device.close()


def rollouts_over(
    engine: Engine, tokenizer: Any, *, max_model_len: int = 512, **options: Any
) -> Rollouts:
    return Rollouts(engine, ChatTokens(tokenizer), "tiny", max_model_len, **options)


@asynccontextmanager
async def client_of(rollouts: Rollouts, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app, without a port."""
    transport = httpx.ASGITransport(create_app(rollouts, **options), raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=HANG_S
    ) as client:
        yield client


@asynccontextmanager
async def on_port(rollouts: Rollouts, *, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """The app behind a real port, on this event loop; its address."""
    async with served_app(create_app(rollouts, **options), port=port) as url:
        yield url


@asynccontextmanager
async def served_app(app: Any, *, port: int = 0) -> AsyncIterator[str]:
    """Any app, in the same way."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(2048)
        server: Any = uvicorn.Server(server_config(app, log_level="error"))
        server.capture_signals = nullcontext
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            server.should_exit = server.force_exit = True
            await serving


async def until(condition: Any) -> None:
    """Until `condition()` holds; fails after a while."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        await asyncio.sleep(0.01)


@contextmanager
def command(place: Path, folder: Path, *flags: str, port: int = 0) -> Iterator[tuple[Forked, str]]:
    """`trireme rollout` in `place`, as its own process on a free port: it, and its address."""
    words = ("rollout", "--model", str(folder), "--port", str(port), *flags)
    process = Forked(words, place, {"CUDA_VISIBLE_DEVICES": ""})
    try:
        yield process, wait_for(lambda: ADDRESS.search(process.said()), process)[1]
    finally:
        process.kill()


def fails(place: Path, folder: Path, *flags: str) -> tuple[int, str]:
    """The exit code and what is said after what it waits for, of a command that cannot serve."""
    words = ("rollout", "--model", str(folder), *flags)
    ended = trireme(place, *words, CUDA_VISIBLE_DEVICES="")
    return ended.returncode, ended.stderr.removeprefix(f"loading {folder}\n")

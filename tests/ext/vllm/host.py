"""Engine processes of vLLM for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm import PYTHON, START_S
from trireme.engines.engine import Engine
from trireme.engines.make import EngineSpec
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import EngineHost, start_all, stop_all


def vllm_host(folder: Path, *, max_model_len: int = 64, **options: Any) -> EngineHost:
    """On a model's folder; its log lies beside it."""
    spec = EngineSpec(str(folder), max_model_len, kind="vllm", options=options)
    return EngineHost(
        spec, name="vllm engine", log_file=folder.parent / "engine.log", python=PYTHON, threads=1
    )


@contextmanager
def serving(folder: Path, *, max_model_len: int) -> Iterator[EngineHost]:
    """An engine's process inside."""
    host = vllm_host(folder, max_model_len=max_model_len)
    asyncio.run(start_all([host], START_S))
    try:
        yield host
    finally:
        asyncio.run(stop_all([host]))


async def with_engine(
    host: EngineHost, folder: Path, main: Callable[[Engine], Awaitable[Any]]
) -> Any:
    """What `main` returns of the engine of this process."""
    engine = RemoteEngine([host.url], api_key=host.key)
    try:
        return await main(engine)
    finally:
        await engine.close()
        again = RemoteEngine([host.url], api_key=host.key)  # as the next test expects to find it
        await again.update_weights(folder, 0)
        await again.resume()
        await again.close()

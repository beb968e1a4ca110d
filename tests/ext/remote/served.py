"""The embedded engine behind a server, for tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.ext.http.made import on_port, torch_rollouts
from trireme.engines.engine import Engine
from trireme.ext.remote.engine import RemoteEngine


async def with_engine(
    folder: Path, max_model_len: int, main: Callable[[Engine], Awaitable[Any]]
) -> Any:
    """What `main` returns of a remote engine over a model's folder."""
    served = torch_rollouts(folder, max_model_len=max_model_len)
    async with served as rollouts, on_port(rollouts) as url:
        engine = RemoteEngine([url])
        try:
            return await main(engine)
        finally:
            await engine.close()

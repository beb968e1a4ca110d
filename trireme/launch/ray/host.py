"""Host: the one actor class. It holds a part, a plain async class, and lets others call it.

A part is made empty, so that all processes start side by side, and gets its plan by `open`.
Ray gives each concurrency group an event loop of its own; a part is not made for several. So its
work runs on one loop in a thread of ours, and Ray's only hand calls over and wait. Long calls and
bytes (`data`), short ones (`control`) and the heartbeat (`ping`) do not wait for each other.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayTaskError


class Host:
    """One part in a process of its own."""

    def __init__(self, part: type, folder: str) -> None:
        """`folder`: where the command was given, to which the YAML's paths are relative."""
        with suppress(FileNotFoundError):  # another machine may lack it, and need it for nothing
            os.chdir(folder)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="part", daemon=True).start()
        self._part = part()

    @ray.method(concurrency_group="control")
    async def control(self, name: str, *args: Any) -> Any:
        """A call that carries no experiences."""
        return await self._do(getattr(self._part, name)(*args))

    @ray.method(concurrency_group="data")
    async def data(self, name: str, *args: Any) -> Any:
        """A call that carries experiences, or lasts as long as the run."""
        return await self._do(getattr(self._part, name)(*args))

    @ray.method(concurrency_group="beat")
    async def ping(self) -> dict[str, Any]:
        """Where this process is; raises what the part says is wrong with it."""
        if health := getattr(self._part, "health", None):
            health()
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    async def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


_actor: Any = ray.remote
HostActor: Any = _actor(concurrency_groups={"control": 32, "data": 32, "beat": 4})(Host)


class Peer:
    """A part in another process: its calls raise what they raised there."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def control(self, name: str, *args: Any) -> Any:
        """See Host."""
        return await answer(self.handle.control.remote(name, *args))

    async def data(self, name: str, *args: Any) -> Any:
        """See Host."""
        return await answer(self.handle.data.remote(name, *args))

    async def ping(self) -> dict[str, Any]:
        """See Host."""
        return await answer(self.handle.ping.remote())


async def answer(reference: Any) -> Any:
    """What a call came to."""
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, RayTaskError):
            raise cause from error
        raise

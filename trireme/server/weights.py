"""Weights: what a trainer sends over a process group, tensor by tensor or in buckets.

The trainer says by HTTP what it will broadcast and then broadcasts it, so that the answer comes
before the tensor. What has come is put to use, all at once, by `ready`: before the next rollout, or
when the client ends its update. A failed broadcast is told there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from trireme.engines.engine import Engine

TIMEOUT = timedelta(seconds=120)


class WeightGroup:
    """The server's side of the group: rank 0 of two, the trainer is the last."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group: Any = None
        self._last: asyncio.Future[None] | None = None
        self._tensors: dict[str, Tensor] = {}

    async def join(self, host: str, port: int) -> None:
        """Open the meeting point and wait for the trainer there, in the background."""
        await self.close()
        self._background(self._connect, host, port)

    async def receive_tensor(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Wait for one tensor, in the background."""
        empty = torch.empty(tuple(shape), dtype=_dtype(dtype))
        await self._after_last()

        def receive() -> None:
            self._broadcast(empty)
            self._tensors[name] = empty

        self._background(receive)

    async def receive_bucket(self, metadatas: Sequence[Mapping[str, Any]]) -> None:
        """Wait for a bucket of bytes, in the background; `start_idx` and `end_idx` are in bytes."""
        size = max((int(m["end_idx"]) for m in metadatas), default=0)
        bucket = torch.empty(size, dtype=torch.uint8)
        await self._after_last()

        def receive() -> None:
            self._broadcast(bucket)
            for m in metadatas:
                part = bucket[int(m["start_idx"]) : int(m["end_idx"])].clone()
                tensor = part.view(_dtype(str(m["dtype"]))).reshape(tuple(m["shape"]))
                self._tensors[str(m["name"])] = tensor

        self._background(receive)

    async def load(self, path: str) -> None:
        """Take the weights of a folder."""
        await self._engine.update_weights(path, self._engine.health().version + 1)

    async def ready(self) -> int:
        """Put to use what has come; the version then. Raises what a broadcast has raised."""
        await self._after_last()
        if self._tensors:
            tensors, self._tensors = self._tensors, {}
            await self._engine.update_weights(tensors, self._engine.health().version + 1)
        return self._engine.health().version

    async def close(self) -> None:
        """Leave the group."""
        await self._after_last()
        self._group = None

    def _connect(self, host: str, port: int) -> None:
        from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

        store = TCPStore(host, port, 2, is_master=True, timeout=TIMEOUT)
        self._group = ProcessGroupGloo(store, 0, 2, TIMEOUT)

    def _broadcast(self, tensor: Tensor) -> None:
        if self._group is None:
            raise ValueError(
                "there is no group to receive weights in: call init_communicator first"
            )
        self._group.broadcast([tensor], 1).wait()

    def _background(self, function: Any, *args: Any) -> None:
        loop = asyncio.get_running_loop()
        self._last = loop.run_in_executor(None, function, *args)

    async def _after_last(self) -> None:
        """Until the broadcast under way has come. Raises RuntimeError where it has not."""
        last, self._last = self._last, None
        if last is not None:
            try:
                await last
            except ValueError:
                raise
            except Exception as error:
                raise RuntimeError(
                    f"the weights that were announced did not come: {error}"
                ) from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype '{name}' is not known: expected float32, bfloat16 and so on")
    return found

"""Weights: what a trainer sends over a process group, tensor by tensor or in buckets.

The trainer says by HTTP what it will broadcast and then broadcasts it, so that the answer comes
before the tensor. What has come is put to use, all at once, by `ready`: before the next rollout, or
when the client ends its update. A failed broadcast is told there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from trireme.engines.engine import Engine
from trireme.server.adapter import base_weights, merge_adapter
from trireme.threads import in_thread

TIMEOUT_S = 120.0
"""How long the trainer may take to meet us, and to send what it has announced."""


@dataclass(frozen=True)
class Part:
    """A tensor's place in a bucket, in bytes."""

    name: str
    dtype: str
    shape: Sequence[int]
    start_idx: int
    end_idx: int


class WeightGroup:
    """The server's side of the group: rank 0 of two, the trainer is the last."""

    def __init__(
        self, engine: Engine, *, model_path: str = "", timeout: float | None = None
    ) -> None:
        """`model_path`: what adapters belong to until full weights come."""
        self._engine = engine
        self._model_path = model_path
        self._base: dict[str, Tensor] | None = None
        self._adapter: Mapping[str, Any] | None = None
        self._timeout = timedelta(seconds=timeout or TIMEOUT_S)
        self._group: Any = None
        self._last: asyncio.Future[None] | None = None
        self._tensors: dict[str, Tensor] = {}
        self._one_by_one = asyncio.Lock()

    async def join(self, host: str, port: int) -> None:
        """Open the meeting point and wait for the trainer there, in the background."""
        async with self._one_by_one:
            await self._apply()
            self._background(lambda: self._connect(host, port))

    async def receive_tensor(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Wait for one tensor, in the background."""
        empty = torch.empty(tuple(shape), dtype=_dtype(dtype))

        def receive() -> None:
            self._broadcast(empty)
            self._tensors[name] = empty

        async with self._one_by_one:
            await self._after_last()
            self._background(receive)

    async def receive_bucket(
        self, parts: Sequence[Part], adapter: Mapping[str, Any] | None = None
    ) -> None:
        """Wait for a bucket of bytes, in the background. `adapter`: they are LoRA weights of this
        configuration.
        """
        bucket = torch.empty(max((p.end_idx for p in parts), default=0), dtype=torch.uint8)
        empty = {p.name: torch.empty(tuple(p.shape), dtype=_dtype(p.dtype)) for p in parts}
        for p in parts:
            expected = empty[p.name].numel() * empty[p.name].element_size()
            if p.end_idx - p.start_idx != expected:
                raise ValueError(
                    f"bucket: {p.name} has bytes {p.start_idx} to {p.end_idx}: expected {expected} "
                    f"bytes for {p.dtype} {list(p.shape)}"
                )

        def receive() -> None:
            self._broadcast(bucket)
            for p in parts:
                own = bucket[p.start_idx : p.end_idx].clone().view(empty[p.name].dtype)
                self._tensors[p.name] = own.reshape(tuple(p.shape))

        async with self._one_by_one:
            await (self._after_last() if adapter is None else self._apply())
            self._adapter = adapter
            self._background(receive)

    async def load(self, path: str) -> None:
        """Take the weights of a folder."""
        await self._engine.update_weights(path, self._engine.health().version + 1)
        self._model_path, self._base = path, None

    async def ready(self) -> int:
        """Put to use what has come; the version then. Raises what a broadcast has raised."""
        async with self._one_by_one:
            await self._apply()
        return self._engine.health().version

    async def close(self) -> None:
        """Leave the group; what has come is put to use before."""
        async with self._one_by_one:
            try:
                await self._apply()
            finally:
                self._group = None

    async def _apply(self) -> None:
        await self._after_last()
        if self._tensors:
            tensors, self._tensors = self._tensors, {}
            if self._adapter is not None:
                config, self._adapter = self._adapter, None
                self._base = self._base or base_weights(self._model_path)
                tensors = merge_adapter(self._base, tensors, config)
            else:
                self._base = tensors
            await self._engine.update_weights(tensors, self._engine.health().version + 1)

    def _connect(self, host: str, port: int) -> None:
        from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

        try:
            store = TCPStore(host, port, 2, is_master=True, timeout=self._timeout)
            self._group = ProcessGroupGloo(store, 0, 2, self._timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"no trainer came to the group at {host}:{port} in "
                f"{self._timeout.total_seconds():g} s: {_first_line(error)}"
            ) from error

    def _broadcast(self, tensor: Tensor) -> None:
        if self._group is None:
            raise ValueError(
                "there is no group to receive weights in: call init_communicator first"
            )
        try:
            self._group.broadcast(tensor, 1).wait()
        except RuntimeError as error:
            self._group, self._tensors = None, {}
            raise RuntimeError(
                f"the weights that were announced did not come: {_first_line(error)}"
            ) from error

    def _background(self, function: Callable[[], None]) -> None:
        """In a thread that keeps nobody from ending."""
        self._last = asyncio.ensure_future(in_thread(function, name="weights"))

    async def _after_last(self) -> None:
        """Until what is under way has come. Raises, once, what it has raised."""
        if self._last is not None:
            await asyncio.wait({self._last})  # a client that goes away does not end it
            last, self._last = self._last, None
            last.result()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype '{name}' is not known: expected float32, bfloat16 and so on")
    return found

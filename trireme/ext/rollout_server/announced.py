"""Announced weights: receives the weights that a trainer of ms-swift or TRL sends over a process
group.

The trainer announces a broadcast by HTTP and then sends it, so that the answer precedes the tensor.
`ready` applies all received weights at once: before the next rollout, or when the client ends its
update. It also raises the error of a failed broadcast. LoRA weights are merged into their full
weights.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trireme.aio import in_thread
from trireme.config.lookup import LEAVES_BASE, weight_files
from trireme.engines.engine import Engine
from trireme.engines.weights import dtype_named
from trireme.ext.remote.group_engine import refuse_no_weights
from trireme.ext.remote.weight_group import TIMEOUT_S, BucketEntry, Meeting, WeightGroup, unpack

_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."


def merge_adapter(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return W + scale B A for every adapted weight, the others unchanged (LoRA, arXiv:2106.09685).

    Names and `config` (`r`, `lora_alpha`, `use_rslora`, `fan_in_fan_out`) are peft's. scale is
    alpha / r, or alpha / sqrt(r). Raises ValueError for an adapter of another model or kind.
    """
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        if rank < 1:
            raise ValueError("r is below 1")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the adapter's configuration needs 'r' and 'lora_alpha', numbers above 0: {error}"
        ) from error
    scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
    if config.get("use_dora") or config.get("rank_pattern") or config.get("alpha_pattern"):
        raise ValueError("the adapter uses DoRA or different ranks for some layers: not supported")
    merged = dict(base)
    unknown = [name for name in adapter if not name.endswith((_A, _B))]
    if unknown:
        raise ValueError(f"the adapter has '{unknown[0]}': expected names that end in {_A} or {_B}")
    for name, a in adapter.items():
        if not name.endswith(_A):
            continue
        stem = name.removesuffix(_A)
        target = f"{stem.removeprefix(_PREFIX)}.weight"
        if target not in base or stem + _B not in adapter:
            raise ValueError(f"the adapter's '{name}' has no {_B[1:]} next to it, or no {target}")
        b = adapter[stem + _B]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ValueError(
                f"the adapter's '{stem}' has A {list(a.shape)} and B {list(b.shape)}: expected "
                "[r, in] and [out, r]"
            )
        change = scale * (b.double() @ a.double())
        if config.get("fan_in_fan_out"):
            change = change.T
        weight = base[target]
        if change.shape != weight.shape:
            raise ValueError(
                f"the adapter's '{stem}' is {list(change.shape)}: expected {list(weight.shape)}"
            )
        merged[target] = (weight.double() + change).to(weight.dtype)
    return merged


def base_weights(model_path: str) -> dict[str, Tensor]:
    """Return the full weights of a model's folder."""
    files = weight_files(Path(model_path))
    if not files:
        raise ValueError(f"{model_path} holds no safetensors file that an adapter could belong to")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


class AnnouncedWeights:
    """The server's side of the group: rank 0 of two; the trainer is rank 1."""

    def __init__(
        self,
        engine: Engine,
        *,
        model_path: str = "",
        timeout: float | None = None,
        max_bytes: int = 2**36,
    ) -> None:
        """`model_path`: the base of adapters until full weights arrive. `max_bytes`: the most that
        may be received before it is applied.
        """
        self._max_bytes = max_bytes
        self._engine = engine
        self._model_path = model_path
        self._base: dict[str, Tensor] | None = None
        self._adapter: Mapping[str, Any] | None = None
        self._timeout = timeout or TIMEOUT_S
        self._group: WeightGroup | None = None
        self._joining: asyncio.Future[None] | None = None
        self._last: asyncio.Future[None] | None = None
        """The newest announced broadcast, until it has been awaited."""
        self._tensors: dict[str, Tensor] = {}
        self._lock = asyncio.Lock()

    async def join(self, host: str, port: int, *, reached: str = "127.0.0.1") -> None:
        """Open the meeting point and wait for the trainer there, in the background.

        `reached`: our address as the client sees it, which replaces `0.0.0.0`. Raises ValueError
        for another address if the client is on this machine: others could reach it.
        """
        address = await _address(host)
        if address.is_unspecified:
            host = reached
        elif (await _address(reached)).is_loopback and not address.is_loopback:
            raise ValueError(
                f"host is {host}: expected {reached}, to which this client has connected; the "
                "weight group's port has no key"
            )
        async with self._lock:
            await self._apply()
            self._joining = asyncio.ensure_future(
                in_thread(lambda: self._connect(host, port), name="weights")
            )

    async def receive_tensor(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Wait for one tensor, in the background."""
        empty = self._allocate(name, dtype, shape)

        def receive() -> None:
            self._broadcast(empty)
            self._tensors[name] = empty

        async with self._lock:
            await self._await_running()
            self._start(receive)

    async def receive_bucket(
        self, parts: Sequence[BucketEntry], adapter: Mapping[str, Any] | None = None
    ) -> None:
        """Wait for a bucket of bytes, in the background. `adapter`: they are LoRA weights of this
        configuration.
        """
        empty = {p.name: self._allocate(p.name, p.dtype, p.shape) for p in parts}
        for p in parts:
            expected = empty[p.name].nbytes
            if p.start_idx < 0 or p.end_idx - p.start_idx != expected:
                raise ValueError(
                    f"bucket: {p.name} has bytes {p.start_idx} to {p.end_idx}: expected {expected} "
                    f"bytes for {p.dtype} {list(p.shape)}"
                )

        size = max((p.end_idx for p in parts), default=0)
        self._check_size(size, "the bucket")
        bucket = torch.empty(size, dtype=torch.uint8)

        def receive() -> None:
            self._broadcast(bucket)
            self._tensors |= dict(unpack(parts, bucket))

        async with self._lock:
            await (self._await_running() if adapter is None else self._apply())
            self._adapter = adapter
            self._start(receive)

    async def load(self, path: str) -> None:
        """Load the weights of a folder."""
        await asyncio.to_thread(refuse_no_weights, path)
        await self._engine.update_weights(path, self._engine.health().version + 1)
        self._model_path, self._base = path, None

    async def ready(self) -> int:
        """Apply the received weights and return the version. Raises a broadcast's error."""
        async with self._lock:
            await self._apply()
        return self._engine.health().version

    async def settled(self) -> None:
        """Call `ready` before a rollout, if weights were announced. Raises RuntimeError if they
        cannot be used, which is not the fault of a rollout's client.
        """
        if self._last is None and not self._tensors:
            return
        try:
            await self.ready()
        except ValueError as error:
            raise RuntimeError(
                f"the weights that a trainer sent cannot be used: {error}"
            ) from error

    async def close(self) -> None:
        """Leave the group, after applying the received weights."""
        async with self._lock:
            try:
                await self._apply()
            finally:
                self._group = None

    def _allocate(self, name: str, dtype: str, shape: Sequence[int]) -> Tensor:
        kind, size = dtype_named(dtype), math.prod(shape)
        if any(not 0 <= length < 2**40 for length in shape):
            raise ValueError(f"shape of {name} is {list(shape)!s:.80}: expected sizes of a tensor")
        self._check_size(size * kind.itemsize, name)
        return torch.empty(tuple(shape), dtype=kind)

    def _check_size(self, size: int, what: str) -> None:
        received = sum(tensor.nbytes for tensor in self._tensors.values())
        if received + size > self._max_bytes:
            raise ValueError(
                f"{what} has {size} bytes, after {received} that are not applied yet: expected at "
                f"most {self._max_bytes} for this model"
            )

    async def _apply(self) -> None:
        await self._await_running()
        if self._tensors:
            tensors, self._tensors = self._tensors, {}
            if self._adapter is not None:
                config, self._adapter = self._adapter, None
                base, adapter = self._base, tensors

                def merged() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
                    start = config.get("init_lora_weights", True)
                    if base is None and start not in LEAVES_BASE:
                        raise ValueError(
                            f"the adapter was begun with init_lora_weights={start!r}, which may "
                            "take its start from the trainer's base, and the base here is that of "
                            f"{self._model_path}: expected the trainer's full weights before its "
                            "adapter"
                        )
                    whole = base or base_weights(self._model_path)
                    return whole, merge_adapter(whole, adapter, config)

                self._base, tensors = await in_thread(merged, name="adapter")
            else:
                self._base = tensors
            await self._engine.update_weights(tensors, self._engine.health().version + 1)

    def _connect(self, host: str, port: int) -> None:
        try:
            group = WeightGroup(Meeting(host, port, 2, 0, timeout=self._timeout))
            group.open()
        except OSError as error:
            raise RuntimeError(
                f"the group's port {host}:{port} cannot be opened: {error}"
            ) from error
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            raise RuntimeError(
                f"no trainer joined the group at {host}:{port} in {self._timeout:g} s: {first}"
            ) from error
        self._group = group

    def _broadcast(self, tensor: Tensor) -> None:
        if self._group is None:
            raise ValueError(
                "there is no group to receive weights in: call init_communicator first"
            )
        try:
            self._group.broadcast(tensor, 1, failure="the announced weights did not arrive")
        except RuntimeError:
            self._group, self._tensors = None, {}
            raise

    def _start(self, function: Callable[[], None]) -> None:
        """Run in a daemon thread, which does not keep the process alive."""
        self._last = asyncio.ensure_future(in_thread(function, name="weights"))

    async def _await_running(self) -> None:
        """Wait for the running work. Raises its exception, once."""
        if (joining := self._joining) is not None:
            await asyncio.wait({joining})  # a client that disconnects does not end it
            self._joining = None
            joining.result()
        if (last := self._last) is not None:
            await asyncio.wait({last})
            self._last = None
            last.result()


async def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, None)
        return ipaddress.ip_address(addresses[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host is {host!r:.80}: expected an address of this machine") from error

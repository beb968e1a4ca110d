"""Weight group: a process group over which a trainer broadcasts its weights to engines' workers.

Rank 0 is the trainer; it opens the store where the members find each other, and each side learns
who did not come. The store has no password: whoever reaches it may write. So it listens at its own
address alone, where torch's would at all of the machine's. Tensors go in buckets of bytes, each
after a line that says what is in it, so that neither side holds more than a bucket beside its
model. A sender that fails says so; one that is gone is seen by the time-out.

A fingerprint, one number for each tensor, tells a right copy from a wrong one. It is exact, where
scores are not: a train step of a small learning rate changes log-probabilities less than another
order of the same sums does, but it changes the tensors.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store, TCPStore


def open_store(host: str, port: int, *, serve: bool, timeout: float) -> TCPStore:
    """A connection to the store at an address; `serve` opens it there, port 0: at any that is free.

    Raises RuntimeError where nobody serves in `timeout` seconds, OSError where we cannot.
    """
    wait = timedelta(seconds=timeout)
    if not serve:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=wait,
        master_listen_fd=listener.detach(),
    )


def gloo_group(
    store: Store, rank: int, size: int, *, timeout: float, address: str
) -> ProcessGroupGloo:
    """A group whose member listens at `address`, where that is one of this machine alone; else
    where torch does, at the address of this machine's name.
    """
    wait = timedelta(seconds=timeout)
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = wait
    try:
        alone = ip_address(socket.gethostbyname(address)).is_loopback
    except OSError:
        alone = False
    device = (
        ProcessGroupGloo.create_device(hostname=address)
        if alone
        else ProcessGroupGloo.create_default_device()
    )
    options._devices = [device]
    return ProcessGroupGloo(store, rank, size, options)


SAMPLES = 1024
"""Numbers looked at in a tensor, evenly spread: a train step changes nearly all."""


def fingerprint(weights: Mapping[str, Tensor], dtype: str) -> dict[str, float]:
    """A sum in which every sampled place counts differently, of the numbers as `dtype` has them."""
    out = {}
    for name, tensor in weights.items():
        stride = max(tensor.numel() // SAMPLES, 1) | 1  # odd: it walks through all columns
        sample = tensor.detach().reshape(-1)[::stride]
        values = sample.to(getattr(torch, dtype)).cpu().double()
        out[name] = float((values * torch.arange(1, len(values) + 1)).sum())
    return out


def refuse_unusable(weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError, naming it, for a tensor that no model can compute with."""
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise ValueError(f"weight '{name}' is of {tensor.dtype}: expected floating point")
        wide = tensor.float() if tensor.itemsize == 1 else tensor
        if not bool(torch.isfinite(wide).all()):
            raise ValueError(f"weight '{name}' holds NaN or an infinite number")


BUCKET_BYTES = 64 * 2**20
TIMEOUT_S = 120.0
"""How long a member may take to come, and then a bucket."""
_END, _FAILED = 0, -1


@dataclass(frozen=True)
class Meeting:
    """Where a group meets, and as whom one comes."""

    host: str
    port: int
    world_size: int
    rank: int
    """In an engine of several workers that of its first one."""
    backend: str = "gloo"
    timeout: float = TIMEOUT_S


class WeightGroup:
    """One member."""

    def __init__(self, meeting: Meeting) -> None:
        """The trainer's opens the meeting point, on any free port where none is given. Raises
        RuntimeError where it is not there.
        """
        self._timeout = timedelta(seconds=meeting.timeout)
        self._meeting = meeting
        where = f"{meeting.host}:{meeting.port}"
        try:
            self._store = open_store(
                meeting.host, meeting.port, serve=meeting.rank == 0, timeout=meeting.timeout
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"the weight group's meeting point {where} was not there in {meeting.timeout:g} s"
            ) from error
        self.port = self._store.port
        kind = "cuda" if meeting.backend == "nccl" else "cpu"
        self.device = torch.device(kind)
        if kind == "cuda":
            self.device = torch.device(kind, torch.cuda.current_device())
        self._group: Any = None
        self._bucket: Tensor | None = None
        """Kept: memory that is new costs more than what is written into it."""

    def connect(self, names: Mapping[int, str] | None = None) -> None:
        """Wait for all. Raises TimeoutError naming who did not come: `names` are those of ranks."""
        m = self._meeting
        self._store.set(f"here/{m.rank}", "1")
        keys = {rank: f"here/{rank}" for rank in range(m.world_size)}
        try:
            self._store.wait(list(keys.values()), self._timeout)
        except RuntimeError as error:
            late = [rank for rank, key in keys.items() if not self._store.check([key])]
            told = {0: "the trainer"} | dict(names or {})
            who = ", ".join(told.get(rank, f"rank {rank}") for rank in late)
            raise TimeoutError(
                f"{who or 'somebody'} did not come to the weight group at {m.host}:{self.port} in "
                f"{m.timeout:g} s"
            ) from error
        from torch._C import _distributed_c10d as c10d

        store = c10d.PrefixStore("weights", self._store)
        if m.backend == "nccl":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = c10d.ProcessGroupNCCL(store, m.rank, m.world_size, options)
        else:
            self._group = gloo_group(store, m.rank, m.world_size, timeout=m.timeout, address=m.host)

    def send(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Broadcast them, as `dtype` where it is given."""
        try:
            for bucket in _buckets(tensors, dtype, bucket_bytes):
                parts = [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in bucket]
                line = torch.frombuffer(bytearray(json.dumps(parts).encode()), dtype=torch.uint8)
                self._share(torch.tensor([len(line), sum(t.nbytes for _, t in bucket)]))
                self._share(line)
                self._share(self._flat([t for _, t in bucket]))
        except BaseException:
            with suppress(RuntimeError):  # what it failed of is the cause, also where nobody hears
                self._share(torch.tensor([_FAILED, 0]))
            raise
        self._share(torch.tensor([_END, 0]))

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """What the trainer sends. Raises RuntimeError where it has failed, or nothing comes."""
        while True:
            sizes = self._share(torch.zeros(2, dtype=torch.int64)).tolist()
            if sizes[0] == _END:
                return
            if sizes[0] == _FAILED:
                raise RuntimeError("the trainer has failed while it sent its weights")
            line = self._share(torch.empty(sizes[0], dtype=torch.uint8))
            data = self._share(torch.empty(sizes[1], dtype=torch.uint8, device=self.device))
            begin = 0
            for name, kind, shape in json.loads(bytes(line.cpu().numpy())):
                dtype = getattr(torch, kind)
                end = begin + dtype.itemsize * torch.Size(shape).numel()
                # a view would have to begin at a multiple of its size
                own = data[begin:end] if begin % dtype.itemsize == 0 else data[begin:end].clone()
                yield name, own.view(dtype).reshape(shape)
                begin = end

    def close(self) -> None:
        """Leave it."""
        self._group = None

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Their bytes, until the next call; those of a tensor that is alone are not copied."""
        flat = [t.to(self.device).contiguous().view(-1).view(torch.uint8) for t in tensors]
        if len(flat) == 1:
            return flat[0]
        size = sum(t.numel() for t in flat)
        if self._bucket is None or self._bucket.numel() < size:
            self._bucket = torch.empty(size, dtype=torch.uint8, device=self.device)
        return torch.cat(flat, out=self._bucket[:size])

    def _share(self, tensor: Tensor) -> Tensor:
        """The trainer's, at every member."""
        if self._group is None:
            raise RuntimeError("there is no weight group: its members have not met")
        tensor = tensor.to(self.device)
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            self._group = None
            raise RuntimeError(f"the weight group has broken: {first}") from error
        return tensor


def _buckets(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, most: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors together up to `most` bytes, in their order; a larger one is alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if bucket and size + tensor.nbytes > most:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach()))
        size += tensor.nbytes
    if bucket:
        yield bucket

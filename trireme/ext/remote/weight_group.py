"""Weight group: sends weights between processes, in buckets of bytes over a process group.

Rank 0 opens the store through which the members find each other (engines/rendezvous.py). The
bucket's format is that of ms-swift's and TRL's trainers: a list of parts, then their bytes.

- Our own trainer is rank 0, and each side learns which members are missing. It lists the parts of
  each bucket in the store before it broadcasts it, so that neither side needs more memory than a
  bucket in addition to its model. A failing sender reports it there; when a sender is gone, so is
  the store.
- No member waits inside a collective. NCCL's would return at once, and its watchdog would later end
  the process: so we poll whether a broadcast is complete, and at the deadline abort the
  communicator and name the members that did not join. After an error NCCL's is complete, too, and
  its watchdog would end the process: the error is read, and ends the group alone.
- If trainer and engine share a device (`ipc`), nothing is broadcast: the group has two members, and
  the header has a handle of the bucket, which the engine copies and acknowledges. The trainer then
  overwrites it with the next bucket. At the end it waits until the engine has unmapped the bucket.
- A trainer of ms-swift or TRL is the last of two ranks and lists the parts by HTTP: their rollout
  server has the routes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch.distributed import DistNetworkError, DistStoreError

from trireme.engines.rendezvous import GLOO_INTERFACE, address_towards, open_store
from trireme.engines.weights import dtype_named
from trireme.ext.remote.bucket_handles import Borrower, Lender


@dataclass(frozen=True)
class BucketEntry:
    """A tensor's place in a bucket, in bytes."""

    name: str
    dtype: str
    shape: Sequence[int]
    start_idx: int
    end_idx: int


def buckets(tensors: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """Group tensors in order into buckets of at most `most` bytes; a larger one is alone."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > most:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.detach()
        size += tensor.nbytes
    if bucket:
        yield bucket


def parts_of(bucket: Mapping[str, Tensor]) -> list[BucketEntry]:
    """Return each tensor's place in the bucket's bytes, one after the other."""
    parts, begin = [], 0
    for name, tensor in bucket.items():
        end = begin + tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts.append(BucketEntry(name, dtype, list(tensor.shape), begin, end))
        begin = end
    return parts


def unpack(parts: Iterable[BucketEntry], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a bucket's bytes, as views if possible."""
    for part in parts:
        dtype = dtype_named(part.dtype)
        span = data[part.start_idx : part.end_idx]
        # a view would have to begin at a multiple of its size
        aligned = span if part.start_idx % dtype.itemsize == 0 else span.clone()
        yield part.name, aligned.view(dtype).reshape(tuple(part.shape))


def gloo_group(
    store: Store, rank: int, size: int, *, timeout: float, address: str
) -> ProcessGroupGloo:
    """Make a group whose member listens where it reaches `address`, the meeting point's: on this
    machine alone, if that is a loopback address, else on the interface that leads there, or the one
    that GLOO_SOCKET_IFNAME names.
    """
    wait = timedelta(seconds=timeout)
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = wait
    own = address_towards(address)
    if own is None or (GLOO_INTERFACE in os.environ and not ip_address(own).is_loopback):
        options._devices = [ProcessGroupGloo.create_default_device()]
    else:
        options._devices = [ProcessGroupGloo.create_device(hostname=own)]
    return ProcessGroupGloo(store, rank, size, options)


_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@contextmanager
def outliving_errors() -> Iterator[None]:
    """A group over NCCL that is made inside leaves its errors to us. By default its watchdog ends
    the process after one, and with it the engine or the whole trainer.
    """
    if _ON_ERROR in os.environ:
        yield
        return
    os.environ[_ON_ERROR] = "2"  # clean up only; it is read when the group is made
    try:
        yield
    finally:
        del os.environ[_ON_ERROR]


BUCKET_BYTES = 64 * 2**20
TIMEOUT_S = 120.0
"""Seconds that a member may take to join, and then for a bucket."""
_PAUSE_S = 2e-5, 2e-3
"""Seconds between two polls of a broadcast: at first, and when it takes long."""


class NotTaken(RuntimeError):
    """An engine has not copied a bucket that its trainer lent."""


@dataclass(frozen=True)
class Meeting:
    """The address where a group's members meet, and this member's rank."""

    host: str
    port: int
    world_size: int
    rank: int
    """The rank; for an engine with several workers that of its first one."""
    backend: str = "gloo"
    """gloo, nccl, or ipc: handles of the trainer's memory, in a group of two."""
    timeout: float = TIMEOUT_S


class WeightGroup:
    """One member of the group."""

    def __init__(self, meeting: Meeting, device: torch.device | None = None) -> None:
        """Rank 0 opens the meeting point, on any free port if none is given. Raises RuntimeError if
        it is not reachable. `device`: the device of a lending trainer's weights.
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
                f"the weight group's meeting point {where} could not be reached in "
                f"{meeting.timeout:g} s"
            ) from error
        self.port = self._store.port
        kind = "cuda" if meeting.backend == "nccl" else "cpu"
        self.device = device or torch.device(kind)
        if kind == "cuda" and device is None:
            self.device = torch.device(kind, torch.cuda.current_device())
        self._group: Any = None
        self._names: Mapping[int, str] = {}
        self._pushes = 0
        self._old: list[str] = []
        self._headers: list[str] = []
        """Store keys of the headers of the current push, or of the last one."""
        self._bucket: Tensor | None = None
        """Reused: allocating memory costs more than writing into it."""

    def connect(self, names: Mapping[int, str] | None = None) -> None:
        """Wait for all members. Raises TimeoutError that names the missing ones: `names` are those
        of ranks.

        A member that lends its buckets does not wait: it notices who does not take the first.
        """
        m = self._meeting
        self._names = {0: "the trainer"} | dict(names or {})
        self._store.set(f"here/{m.rank}", "1")
        if m.backend == "ipc" and m.rank == 0:
            self.open()
            return
        keys = {rank: f"here/{rank}" for rank in range(m.world_size)}
        try:
            self._store.wait(list(keys.values()), self._timeout)
        except RuntimeError as error:
            late = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise TimeoutError(
                f"{self._named(late) or 'a member'} did not join the weight group at "
                f"{m.host}:{self.port} in {m.timeout:g} s"
            ) from error
        from torch._C import _distributed_c10d as c10d

        self.open(c10d.PrefixStore("weights", self._store))

    def open(self, store: Any = None) -> None:
        """Make the group without a roll call, as other systems' trainers expect. Raises
        RuntimeError if a member does not join.
        """
        m, store = self._meeting, store or self._store
        if m.backend == "nccl":
            from torch._C import _distributed_c10d as c10d

            options = c10d.ProcessGroupNCCL.Options()
            # its watchdog ends the process: `_finish` comes before it
            options._timeout = 3 * self._timeout + timedelta(seconds=60)
            with outliving_errors():
                self._group = c10d.ProcessGroupNCCL(store, m.rank, m.world_size, options)
        elif m.backend == "ipc":
            self._group = Lender(self.device)
        else:
            self._group = gloo_group(store, m.rank, m.world_size, timeout=m.timeout, address=m.host)

    def send(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Broadcast tensors, or lend them. `given_up`: polled while an engine copies a lent bucket.

        Raises NotTaken if the engine does not take a bucket, or `given_up` is true.
        """
        self._begin()
        lender = self._group if isinstance(self._group, Lender) else None
        try:
            for bucket in buckets(tensors, bucket_bytes):
                parts = [list(vars(part).values()) for part in parts_of(bucket)]
                if lender is not None:
                    handle = lender.handle(self._flat(bucket.values()))
                    self._announce(parts=parts, handle=handle)
                    self._await_taken(given_up)
                    continue
                self._announce(parts=parts)
                self.broadcast(self._flat(bucket.values()))
        except BaseException as error:
            with suppress(RuntimeError):  # its error is the cause, also if no peer receives it
                self._announce(failed=f"{type(error).__name__}: {error}")
            raise
        self._announce(parts=[])
        if lender is not None:
            self._await_taken(given_up)
            if lender.on_gpu:
                self._bucket = None
                lender.abort()

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the trainer sends. Raises RuntimeError if it has failed, or
        nothing arrives.
        """
        self._begin()
        borrower = Borrower()
        try:
            while (header := self._header())["parts"]:
                parts = [BucketEntry(*row) for row in header["parts"]]
                if (handle := header.get("handle")) is not None:
                    data = borrower.copy(handle)
                    self._say_taken()
                else:
                    empty = torch.empty(parts[-1].end_idx, dtype=torch.uint8, device=self.device)
                    data = self.broadcast(empty)
                yield from unpack(parts, data)
        finally:
            borrower.close()
        if self._meeting.backend == "ipc":
            self._say_taken()

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, failure: str = "the weight group has broken"
    ) -> Tensor:
        """Return the root's tensor, at every member. A `failure` ends the group."""
        if self._group is None:
            raise RuntimeError("there is no weight group: its members have not joined")
        tensor = tensor.to(self.device)
        try:
            self._finish(self._group.broadcast(tensor, root))
        except RuntimeError as error:
            self._abort()
            first = str(error).strip().partition("\n")[0]
            raise RuntimeError(f"{failure}: {first}") from error
        return tensor

    def _say_taken(self) -> None:
        self._store.set(f"{self._headers[-1]}/taken", "1")

    def _await_taken(self, given_up: Callable[[], bool]) -> None:
        """Wait until the engine has copied the last announced bucket, or has learned of the end."""
        taken = [f"{self._headers[-1]}/taken"]
        in_time = self._in_time(lambda: given_up() or self._store.check(taken))
        if given_up():
            raise NotTaken("the push was given up")
        if not in_time:
            raise NotTaken(self._who_is_late())

    def _finish(self, work: Any) -> None:
        """Wait until it is complete. Raises RuntimeError with its error, or with the names of the
        members that were late.
        """
        if not self._in_time(work.is_completed):
            raise RuntimeError(self._who_is_late())
        # NCCL's work is complete after an error too, of which `wait` says nothing: the tensor holds
        # what it held before. Not asked of gloo's, which raises it: torch warns of each first call
        if self._meeting.backend == "nccl" and (error := work.exception()) is not None:
            raise RuntimeError(str(error))
        work.wait()  # returns at once: raises gloo's error, and orders the device's streams

    def _in_time(self, done: Callable[[], bool]) -> bool:
        """Return whether `done()` is true before the deadline, polling at ever longer intervals."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause, longest = _PAUSE_S
        while not done():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def _who_is_late(self) -> str:
        seconds = f"in {self._meeting.timeout:g} s"
        if not self._headers:
            return f"nothing came {seconds}"
        bucket = f"bucket {len(self._headers)} of push {self._pushes}"
        others = [r for r in range(1, self._meeting.world_size) if r != self._meeting.rank]
        try:
            late = [rank for rank in others if not self._is_at(rank, self._headers[-1])]
        except RuntimeError:
            return f"{self._named([0])} has gone during {bucket}"
        if late:
            return f"{self._named(late)} did not reach {bucket} {seconds}"
        return f"{bucket} did not arrive {seconds}, although all members were ready for it"

    def _is_at(self, rank: int, header: str) -> bool:
        key = f"at/{rank}"
        return self._store.check([key]) and self._store.get(key).decode() == header

    def _named(self, ranks: Iterable[int]) -> str:
        return ", ".join(self._names.get(rank, f"rank {rank}") for rank in ranks)

    def _abort(self) -> None:
        """Leave the group, and abandon the work that still runs on a device."""
        group, self._group = self._group, None
        with suppress(RuntimeError):  # it has failed already
            group.abort()

    def _begin(self) -> None:
        """Begin a push. Members that took a bucket of the last push had finished the one before,
        whose headers can be deleted; the last push's own may still be read.
        """
        for key in self._old if self._meeting.rank == 0 else ():
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/taken")
        self._pushes, self._old, self._headers = self._pushes + 1, self._headers, []

    def _announce(self, **header: Any) -> None:
        self._headers.append(f"push/{self._pushes}/{len(self._headers)}")
        self._store.set(self._headers[-1], json.dumps(header))

    def _header(self) -> dict[str, Any]:
        """Wait for the next bucket's header: its `parts`, empty at the end of a push, and its
        `handle`.
        """
        if self._group is None:
            raise RuntimeError("there is no weight group: its members have not joined")
        key = f"push/{self._pushes}/{len(self._headers)}"
        why = f"{self._named([0])} sent nothing in {self._meeting.timeout:g} s"
        try:
            self._store.wait([key], self._timeout)
            header = json.loads(self._store.get(key))
            self._headers.append(key)
            self._store.set(f"at/{self._meeting.rank}", key)
        except (DistStoreError, DistNetworkError) as error:
            if isinstance(error, DistNetworkError):
                why = f"{self._named([0])} is gone"
            self._abort()
            raise RuntimeError(f"the weight group has broken: {why}") from error
        if "failed" in header:
            raise RuntimeError(
                f"the trainer has failed while it sent its weights: {header['failed']}"
            )
        return header

    def _flat(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the bytes of the tensors, valid until the next call; a single tensor's are not
        copied, unless they must be where they can be lent.
        """
        flat = [t.to(self.device).contiguous().view(-1).view(torch.uint8) for t in tensors]
        lender = self._group if isinstance(self._group, Lender) else None
        if len(flat) == 1 and lender is None:
            return flat[0]
        size = sum(t.numel() for t in flat)
        if self._bucket is None or self._bucket.numel() < size:
            self._bucket = None  # freed first: on a GPU both would be large
            self._bucket = (
                lender.new_bytes(max(size, 1))
                if lender
                else torch.empty(size, dtype=torch.uint8, device=self.device)
            )
        return torch.cat(flat, out=self._bucket[:size])

"""Ranks: the processes that train one model together, how they meet and what they tell each other.

Rank 0 keeps a small store (TCP) through which the others find it, take its orders and beat; tensors
travel through a torch.distributed group. What is told is JSON and plain bytes, never pickle.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trireme.engines.store import open_store


@dataclass(frozen=True)
class Place:
    """Which rank a process is, and where all of them meet. Plain values: it may be sent around."""

    rank: int
    world: int
    address: str
    """host:port of rank 0."""
    sequence: int = 1
    """Ranks that share a sequence: `trainer.ulysses_sequence_parallel_size`."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    timeout: float = 1800.0
    """Seconds that a collective, or the meeting, may take: `trainer.collective_timeout`."""
    lost_after: float = 20.0
    """Seconds without a sign of life after which a rank counts as dead."""

    def __post_init__(self) -> None:
        if self.world % self.sequence:
            raise ValueError(
                f"trainer.ulysses_sequence_parallel_size is {self.sequence}: expected a divisor of "
                f"the {self.world} ranks that train"
            )


@dataclass(frozen=True)
class Sequence:
    """The ranks that share a sequence, seen from one of them."""

    group: dist.ProcessGroup
    rank: int
    size: int


class Ranks:
    """This process among the others; made by all of them at once."""

    def __init__(self, place: Place) -> None:
        """Waits for all, `place.timeout` at most. Raises TimeoutError saying who is missing."""
        self.place = place
        self.rank, self.world = place.rank, place.world
        self.device = torch.device(place.device)
        self.store = connect(place, serve=place.rank == 0)
        self.store.set(f"here/{self.rank}", socket.gethostname())
        self._meet()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=self.store,
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=place.timeout),
        )
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (self.world,))
        # Neighbours share a sequence: their traffic is the heaviest.
        self.sequence: Sequence | None = None
        if place.sequence > 1:
            group, _ = dist.new_subgroups(place.sequence)
            assert isinstance(group, dist.ProcessGroup)
            self.sequence = Sequence(group, self.sequence_rank, place.sequence)

    @property
    def data_rank(self) -> int:
        """Which share of a batch this rank works on."""
        return self.rank // self.place.sequence

    @property
    def data_world(self) -> int:
        """Shares of a batch."""
        return self.world // self.place.sequence

    @property
    def sequence_rank(self) -> int:
        """Which slice of a sequence this rank holds."""
        return self.rank % self.place.sequence

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank, on every rank. Collective."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = int(torch.cat(sizes).max())
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(rows, torch.nn.functional.pad(data, (0, longest - len(data))))
        return [
            json.loads(row[: int(size)].numpy().tobytes())
            for row, size in zip(rows, sizes, strict=True)
        ]

    def broadcast(self, data: bytes | None, size: int) -> bytes:
        """Rank 0's bytes on every rank; the others know their number already. Collective."""
        row = torch.empty(size, dtype=torch.uint8)
        if data is not None:
            row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(row, 0)
        return row.numpy().tobytes()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _meet(self) -> None:
        """Until every rank has come."""
        for rank in range(self.world):
            try:
                self.store.wait([f"here/{rank}"], timedelta(seconds=self.place.timeout))
            except dist.DistStoreError as error:
                raise TimeoutError(
                    f"trainer rank {self.rank} waited {self.place.timeout:g} s "
                    f"(trainer.collective_timeout) for rank {rank} of {self.world} to start"
                ) from error


def connect(place: Place, *, serve: bool = False) -> TCPStore:
    """A connection of its own to the store of rank 0, which `serve`s it."""
    host, _, port = place.address.rpartition(":")
    return open_store(host, int(port), serve=serve, timeout=place.timeout)


def free_address(host: str = "127.0.0.1") -> str:
    """An address on this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"

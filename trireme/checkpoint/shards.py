"""Shards: tensors whose rows are spread over ranks, in memory and in the files of a checkpoint.

A tensor is split along its first dimension into runs of ceil(rows / ranks), as FSDP2 does; a file
of one rank so holds one run of each, and any number of ranks can read what any number wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Rows(Protocol):
    """A whole tensor on the disk, of which a rank reads the rows that it holds."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the whole."""
        ...


@dataclass(frozen=True)
class Pieces:
    """One tensor as the files of all ranks have it: its rows, end to end."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        """See Rows."""
        return torch.Size([sum(len(part) for part in self.parts), *self.parts[0].shape[1:]])

    def rows(self, start: int, stop: int) -> Tensor:
        """See Rows."""
        taken, begin = [], 0
        for part in self.parts:
            taken.append(part[max(start - begin, 0) : max(stop - begin, 0)])
            begin += len(part)
        return torch.cat(taken)


@dataclass(frozen=True)
class FileRows:
    """One tensor of an open safetensors file."""

    file: Any
    name: str

    @property
    def shape(self) -> torch.Size:
        """See Rows."""
        return torch.Size(self.file.get_slice(self.name).get_shape())

    def rows(self, start: int, stop: int) -> Tensor:
        """See Rows."""
        return self.file.get_slice(self.name)[start:stop]


def assign(target: Tensor, source: Tensor | Rows) -> None:
    """Fill `target`, or the rows of it that this rank holds, from the whole `source`."""
    if isinstance(target, DTensor):
        start, stop = own_rows(target)
        target.to_local().copy_(_rows(source, start, stop))
    elif target.dim() or not isinstance(source, Tensor):
        target.copy_(_rows(source, 0, len(target)))
    else:
        target.copy_(source)


def like(source: Tensor | Rows, parameter: Tensor) -> Tensor:
    """The whole `source` in memory, or this rank's rows of it, as `parameter` is sharded.

    What has another shape than the parameter (a count of steps) is the same on all ranks.
    """
    if source.shape != parameter.shape:
        assert isinstance(source, Tensor)
        return source
    made = torch.empty_like(parameter)
    assign(made, source)
    return made


def own_rows(tensor: DTensor) -> tuple[int, int]:
    """First and last + 1 row of the whole that this rank holds."""
    mesh = tensor.device_mesh
    length = -(-tensor.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * length, tensor.shape[0])
    return start, start + len(tensor.to_local())


def _rows(source: Tensor | Rows, start: int, stop: int) -> Tensor:
    return source[start:stop] if isinstance(source, Tensor) else source.rows(start, stop)

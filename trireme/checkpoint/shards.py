"""Shards: tensors whose rows are spread over ranks, in memory and in the files of a checkpoint.

A tensor is split along its first dimension into runs of ceil(rows / ranks), as FSDP2 does; a file
of one rank so holds one run of each, and any number of ranks can read what any number wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Pieces:
    """One tensor as the files of all ranks have it: its rows, end to end."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size([sum(len(part) for part in self.parts), *self.parts[0].shape[1:]])

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the whole."""
        taken, begin = [], 0
        for part in self.parts:
            taken.append(part[max(start - begin, 0) : max(stop - begin, 0)])
            begin += len(part)
        return torch.cat(taken)


def rows_of(source: Tensor | Pieces, start: int, stop: int) -> Tensor:
    """Rows of a whole tensor, in one piece or several."""
    return source.rows(start, stop) if isinstance(source, Pieces) else source[start:stop]


def assign(target: Tensor, source: Tensor | Pieces) -> None:
    """Fill `target`, or this rank's rows of it, from the whole `source`."""
    if isinstance(target, DTensor):
        start, stop = own_rows(target)
        target.to_local().copy_(rows_of(source, start, stop))
    elif target.dim():
        target.copy_(rows_of(source, 0, len(target)))
    else:
        assert isinstance(source, Tensor)
        target.copy_(source)


def own_rows(tensor: DTensor) -> tuple[int, int]:
    """First and last + 1 row of the whole that this rank holds."""
    mesh = tensor.device_mesh
    length = -(-tensor.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * length, tensor.shape[0])
    return start, start + len(tensor.to_local())


def joined(parts: Sequence[Tensor]) -> Tensor | Pieces:
    """What the files of all ranks hold under one name: sharded, or alike in all of them."""
    if isinstance(parts[0], DTensor):
        return Pieces(tuple(part.to_local() for part in parts if isinstance(part, DTensor)))
    return parts[0]

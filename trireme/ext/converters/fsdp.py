"""FSDP shards: joins them, `model_world_size_W_rank_R.pt`, into whole tensors in one process.

A shard contains, under the model's own names, either DTensors, whose mesh and placements determine
their box of the tensor, or plain tensors: parts along dimension 0, in the order of the ranks, or
the same whole tensor in each. Files are mapped, and remapped from time to time: pages that were
read would otherwise stay in memory until the end.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard  # also lets weights_only read them

from trireme.checkpoint.export import Spec
from trireme.config.lookup import Shape

SHARD = re.compile(r"^model_world_size_(\d+)_rank_(\d+)\.pt$")
MAPPED_BYTES = 2**28
"""Bytes read before the files are remapped."""


def find_shards(actor: Path) -> list[Path]:
    """Return a folder's shards in the order of their ranks; none if it has none.

    Raises ValueError if a rank's file is missing, or if the world size is ambiguous.
    """
    worlds: dict[int, dict[int, Path]] = {}
    for path in actor.glob("model_world_size_*_rank_*.pt"):
        if match := SHARD.match(path.name):
            worlds.setdefault(int(match[1]), {})[int(match[2])] = path
    if not worlds:
        return []
    config = actor / "fsdp_config.json"
    facts = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    world = facts.get("world_size") or min(worlds)
    if world not in worlds or (len(worlds) > 1 and "world_size" not in facts):
        raise ValueError(
            f"{actor} has shards of world sizes {', '.join(map(str, sorted(worlds)))}, and "
            f"fsdp_config.json says {facts.get('world_size', 'nothing')}: remove those of other "
            "runs"
        )
    missing = [rank for rank in range(world) if rank not in worlds[world]]
    if missing:
        raise ValueError(f"{actor}/model_world_size_{world}_rank_{missing[0]}.pt is missing")
    return [worlds[world][rank] for rank in range(world)]


class FsdpReader:
    """The reader of FSDP shards."""

    form = "model_world_size_W_rank_R.pt"
    mark = None
    beside_own = True

    def find(self, folder: Path) -> list[Path]:
        """Return the files of all ranks."""
        return find_shards(folder)

    def open(
        self, files: Sequence[Path], config: Mapping[str, Any], expected: Mapping[str, Shape] | None
    ) -> FsdpShards:
        """Open the shards."""
        return FsdpShards(list(files), expected)


class FsdpShards:
    """The whole tensors of a model that W ranks saved."""

    def __init__(self, files: list[Path], expected: Mapping[str, Shape] | None = None) -> None:
        """`expected`: shapes by the configuration, which distinguish plain parts from plain
        copies.
        """
        self._files = files
        self._ranks = [_load(path) for path in files]
        self._read = 0
        self.specs: dict[str, Spec] = {}
        for path, tensors in zip(files, self._ranks, strict=True):
            odd = sorted(tensors.keys() ^ self._ranks[0].keys())
            if odd:
                raise ValueError(f"{path} and {files[0].name} differ: only one has {odd[0]}")
        for name, tensor in self._ranks[0].items():
            wanted = expected.get(name) if expected else None
            self.specs[name] = Spec(self._shape(name, wanted), tensor.dtype)

    def fill(self, name: str, out: Tensor) -> None:
        """Copy each rank's box into its place; parts on several ranks are copied once."""
        if self._read > MAPPED_BYTES:
            self._ranks = []
            self._ranks, self._read = [_load(path) for path in self._files], 0
        seen: set[tuple[tuple[int, ...], Shape]] = set()
        row = 0
        for rank, tensors in enumerate(self._ranks):
            tensor = tensors[name]
            if isinstance(tensor, DTensor):
                begin, local = _place(name, tensor, rank, self._files[rank])
            else:
                whole = tensor.shape == out.shape
                begin, local = (0 if whole else row, *(0,) * (out.dim() - 1))[: out.dim()], tensor
                row += 0 if whole or not out.dim() else tensor.shape[0]
            box = (begin, tuple(local.shape))
            if box in seen or not local.numel():
                continue
            seen.add(box)
            target = out
            for dim, (start, length) in enumerate(zip(*box, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(local)
            self._read += local.numel() * local.element_size()
        held = sum(math.prod(shape) for _, shape in seen)
        if held != out.numel():
            raise ValueError(
                f"{self._files[0].parent}: the shards hold {held} of {out.numel()} elements of "
                f"{name}"
            )

    def _shape(self, name: str, expected: Shape | None) -> Shape:
        """Return a tensor's whole shape, on which the ranks must agree."""
        parts = [tensors[name] for tensors in self._ranks]
        for path, part in zip(self._files, parts, strict=True):
            same = isinstance(part, DTensor) == isinstance(parts[0], DTensor)
            inner = slice(0 if isinstance(part, DTensor) else 1, None)
            if not same or part.shape[inner] != parts[0].shape[inner]:
                raise ValueError(
                    f"{path}: {name} is {list(part.shape)}, which does not match "
                    f"{list(parts[0].shape)} of {self._files[0].name}"
                )
        shape = tuple(parts[0].shape)
        copies = all(tuple(part.shape) == expected for part in parts)
        if isinstance(parts[0], DTensor) or not shape or copies:
            return shape
        return (sum(part.shape[0] for part in parts), *shape[1:])


def _load(path: Path) -> dict[str, Tensor]:
    log = logging.getLogger("torch.distributed.device_mesh")
    was, log.disabled = log.disabled, True  # it warns that there are no process groups: as meant
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        names = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it holds a {names[1]}; expected tensors and DTensors" if names else str(error)
        raise ValueError(f"{path} cannot be read: {what}") from error
    except RuntimeError as error:
        raise ValueError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    finally:
        log.disabled = was
    for name, tensor in tensors.items() if isinstance(tensors, dict) else [("it", tensors)]:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path}: {name} is a {type(tensor).__name__}; expected a tensor")
    return tensors


def _place(name: str, tensor: DTensor, rank: int, path: Path) -> tuple[tuple[int, ...], Tensor]:
    """Return the offset of a rank's part of a tensor, and the part."""
    spec, local = tensor._spec, tensor._local_tensor
    mesh = spec.mesh.mesh
    places = (mesh == rank).nonzero()
    if len(places) != 1:
        raise ValueError(f"{path}: {name} is on the ranks {mesh.tolist()}, not on rank {rank}")
    begin, size = [0] * tensor.dim(), list(tensor.shape)
    for along, (at, placement) in enumerate(zip(places[0].tolist(), spec.placements, strict=True)):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            raise ValueError(
                f"{path}: {name} is placed as {placement}; expected Replicate or Shard"
            )
        dim = placement.dim % tensor.dim()
        part = -(-size[dim] // mesh.shape[along])
        first = min(part * at, size[dim])
        begin[dim] += first
        size[dim] = min(part, size[dim] - first)
    if list(local.shape) != size:
        raise ValueError(f"{path}: {name} is {list(local.shape)} there; its placement says {size}")
    return tuple(begin), local

"""DCP: reads torch distributed checkpoints: their `.metadata` pickle, and parts of their tensors.

The metadata lists the tensors, their pieces, and the place of each. It is the only pickle that is
read without `weights_only`, so only the classes for these facts are allowed; any other name is
refused before anything of it is made. A part of a tensor is a box: its start, and its length along
each dimension. Only the pieces that a box meets are read.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Sequence
from pathlib import Path, PurePath
from pickle import UnpicklingError
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.filesystem", "_StoragePrefix"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.planner", "SavePlan"),
    (f"{_DCP}.planner", "TensorWriteData"),
    (f"{_DCP}.planner", "WriteItem"),
    (f"{_DCP}.planner", "WriteItemType"),
}
_MEGATRON = ("MCoreMetadata", "MCoreSavePlan")
"""Older Megatron's own kinds of two of these classes: their additions are not needed."""


class _SameAsMetadata(Metadata):
    """Holds the state of Megatron's subclass; its further fields are attributes."""


class _Ignored:
    """A save plan: lists which rank wrote which part, which reading does not need."""


_PATHS = ("PosixPath", "WindowsPath")
"""Classes of the original paths, which are not needed."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "megatron.core.dist_checkpointing.strategies.torch" and name in _MEGATRON:
            return _SameAsMetadata if name == "MCoreMetadata" else _Ignored
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePath
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no checkpoint's metadata contains"
            )
        return super().find_class(module, name)


def read_metadata(file: IO[bytes], path: Path) -> Metadata:
    """Return the metadata in a file. Raises ValueError if it is not such a file, or names other
    classes.
    """
    try:
        metadata = _Unpickler(file).load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(
            f"{path} cannot be read: it contains no metadata of a distributed checkpoint"
        )
    for entry in metadata.storage_data.values():
        name = entry.relative_path
        if PurePath(name).name != name:
            raise ValueError(f"{path} names the file '{name}', which is not in its folder")
    return metadata


METADATA = ".metadata"


class DistributedCheckpoint:
    """The tensors of a folder by name, and their boxes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _Reader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's whole shape."""
        return tuple(self.tensors[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type in which a tensor is stored."""
        return self.tensors[name].properties.dtype

    def read(self, name: str, begin: Sequence[int], out: Tensor) -> None:
        """Fill `out` with the box of a tensor that begins at `begin`, cast to its dtype.

        Raises ValueError if a part of the box, or its file, is missing.
        """
        items = list(self._items(name, begin, tuple(out.shape)))
        covered = sum(math.prod(item.lengths) for item in items)
        if covered != out.numel():
            raise ValueError(
                f"{self.folder} has only {covered} of {out.numel()} elements of {name} from "
                f"{list(begin)} on"
            )
        try:
            self._reader.read_data(LoadPlan(items), cast(LoadPlanner, _Into(out)))
        except OSError as error:
            raise ValueError(f"cannot read {name}: {error}") from error
        except (RuntimeError, EOFError, AssertionError, UnpicklingError) as error:
            raise ValueError(f"{self.folder}: {name} is damaged: {error}") from error

    def _items(self, name: str, begin: Sequence[int], lengths: Sequence[int]) -> Any:
        """Yield the parts to copy from each piece that overlaps the box."""
        for chunk in self.tensors[name].chunks:
            low = [max(b, o) for b, o in zip(begin, chunk.offsets, strict=True)]
            high = [
                min(b + n, o + size)
                for b, n, o, size in zip(begin, lengths, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(start < end for start, end in zip(low, high, strict=True)):
                yield ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(name),
                    dest_offsets=torch.Size(x - b for x, b in zip(low, begin, strict=True)),
                    storage_index=MetadataIndex(name, chunk.offsets),
                    storage_offsets=torch.Size(
                        x - o for x, o in zip(low, chunk.offsets, strict=True)
                    ),
                    lengths=torch.Size(y - x for x, y in zip(low, high, strict=True)),
                )


class _Reader(FileSystemReader):
    """Torch's reader; the metadata's pickle is read by ours."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(os.fspath(self.path)) / METADATA
        with path.open("rb") as file:
            return read_metadata(file, path)


class _Into:
    """The part of a load planner that reading needs: the destination of each box."""

    def __init__(self, out: Tensor) -> None:
        self._out = out

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        out = self._out
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            out = out.narrow(dim, start, length)
        return out

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the box was copied to its place."""

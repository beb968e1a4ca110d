"""DCP metadata: reads the `.metadata` pickle of a torch distributed checkpoint, and no other.

Such a file says which tensors there are, in which pieces, and where each lies. It is the only
pickle that is read without `weights_only`, so only the classes that describe this are let in;
any other name is refused before anything of it is made.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

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
"""Older Megatron's own kinds of two of these classes: what they add is not needed."""


class _SameAsMetadata(Metadata):
    """Holds what Megatron's subclass held; its further fields are attributes."""


class _Ignored:
    """A save plan: says who wrote what, which reading does not need."""


_PATHS = ("PosixPath", "WindowsPath")
"""Where it was written stands in it too, and is not needed."""


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
                f"it names {module}.{name}, which no checkpoint's metadata holds"
            )
        return super().find_class(module, name)


def read_metadata(file: IO[bytes], path: Path) -> Metadata:
    """The metadata in a file. Raises ValueError where it is no such file, or asks for more."""
    try:
        metadata = _Unpickler(file).load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise ValueError(f"{path} is not read: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{path} is not read: it holds no metadata of a distributed checkpoint")
    for place in metadata.storage_data.values():
        name = place.relative_path
        if PurePath(name).name != name:
            raise ValueError(f"{path} names the file '{name}', which is not one of its folder")
    return metadata

"""Export: the safetensors files of a model, to which several processes write rows.

Past a size there are several files and an index, as `save_pretrained` names them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trireme.config.lookup import INDEX, Shape
from trireme.files import naming, write_json

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The names of dtypes in safetensors."""


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of a tensor, known before it is read."""

    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The size of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


class OwnFile:
    """The one safetensors file of a trainer of one process."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self.specs: dict[str, Spec] = {}
        for name in self._file.keys():  # noqa: SIM118 - it is not a mapping
            part = self._file.get_slice(name)
            self.specs[name] = Spec(tuple(part.get_shape()), DTYPES[part.get_dtype()])

    def fill(self, name: str, out: Tensor) -> None:
        """Copy a tensor."""
        out.copy_(self._file.get_tensor(name))


class SharedFiles:
    """A model's safetensors files, to which several processes write rows concurrently."""

    def __init__(
        self, folder: Path, specs: Mapping[str, Spec], shard_bytes: float = math.inf
    ) -> None:
        """All processes pass the same arguments, with `specs` in the order of the files."""
        shards = shards_of(dict(specs), shard_bytes)
        self._folder = folder
        self._shards = dict(zip(file_names(len(shards)), shards, strict=True))

    def create(self) -> None:
        """Create files of their full size, with headers. Raises OSError naming the path."""
        for name, shard in self._shards.items():
            path = self._folder / name
            with naming(path), path.open("wb") as file:
                file.write(header_of(shard))
                file.truncate(file.tell() + sum(spec.num_bytes for spec in shard.values()))

    def write(self, parts: Iterable[tuple[str, int, Tensor]]) -> None:
        """Write some rows of some tensors: a tensor's name, the first of the rows, and the rows."""
        places: dict[str, tuple[Path, int, Spec]] = {}
        for name, shard in self._shards.items():
            at = len(header_of(shard))
            for tensor, spec in shard.items():
                places[tensor] = self._folder / name, at, spec
                at += spec.num_bytes
        for tensor, first, rows in parts:
            path, at, spec = places[tensor]
            row = spec.num_bytes // max(spec.shape[0], 1) if spec.shape else 0
            with naming(path), path.open("r+b") as file:
                file.seek(at + first * row)
                file.write(bytes_of(rows, spec.dtype))

    def finish(self) -> None:
        """Write the list of the files, if there are several."""
        if len(self._shards) > 1:
            write_index(self._folder, self._shards)


def write_index(folder: Path, shards: Mapping[str, Mapping[str, Spec]]) -> None:
    """Write the list of the file of each tensor."""
    total = sum(spec.num_bytes for shard in shards.values() for spec in shard.values())
    places = {name: file for file, shard in shards.items() for name in shard}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def header_of(specs: Mapping[str, Spec]) -> bytes:
    """Return the start of a safetensors file: its tensors and their places."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.num_bytes
        header[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    """Return a tensor's numbers as a file has them."""
    flat = tensor.detach().to("cpu", dtype).reshape(-1).view(torch.uint8)
    return flat.numpy().data


DEFAULT_SHARD_BYTES = 5 * 10**9
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def as_written(spec: Spec, dtype: torch.dtype | None) -> Spec:
    """Return the spec of a tensor in files of a dtype, which only floating-point ones take on."""
    return Spec(spec.shape, dtype if dtype and spec.dtype.is_floating_point else spec.dtype)


def shards_of(specs: dict[str, Spec], most: float) -> list[dict[str, Spec]]:
    """Divide tensors among files of at most `most` bytes; a larger tensor has one of its own."""
    shards: list[dict[str, Spec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.num_bytes > most:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += spec.num_bytes
    return shards


def file_names(count: int) -> list[str]:
    """Return the names of a model's files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]

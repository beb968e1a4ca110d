"""Export: reads and writes a model's weights with one tensor in memory at a time.

A `Source` has the tensors of a trained model by their Hugging Face names, wherever they are stored.
Past a size there are several files and an index, as `save_pretrained` names them. All of them are
written under temporary names first: old files stay until the new ones are whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from trireme.config.lookup import INDEX, Shape
from trireme.files import beside, naming, sync, write_json

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


class Source(Protocol):
    """Tensors that are read one at a time, each into a tensor made for it."""

    specs: dict[str, Spec]

    def fill(self, name: str, out: Tensor) -> None:
        """Copy a tensor into one of its shape and any dtype. Raises ValueError naming its file."""
        ...


class OwnFile:
    """The one safetensors file of a trainer of one process."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self.specs: dict[str, Spec] = {}
        for name in self._file.keys():  # noqa: SIM118 - it is no mapping
            part = self._file.get_slice(name)
            self.specs[name] = Spec(tuple(part.get_shape()), DTYPES[part.get_dtype()])

    def fill(self, name: str, out: Tensor) -> None:
        """Copy a tensor."""
        out.copy_(self._file.get_tensor(name))


def write_tensors(path: Path, specs: Mapping[str, Spec], tensors: Iterable[Tensor]) -> None:
    """Write one safetensors file with tensors in the order of `specs`, each made when it is
    written.

    Sorted names give the bytes of `write_weights`.
    """
    with naming(path), path.open("wb") as file:
        file.write(_header(specs))
        for spec, tensor in zip(specs.values(), tensors, strict=True):
            file.write(_bytes_of(tensor, spec.dtype))


class SharedFiles:
    """A model's safetensors files, to which several processes write rows concurrently."""

    def __init__(
        self, folder: Path, specs: Mapping[str, Spec], shard_bytes: float = math.inf
    ) -> None:
        """All processes pass the same arguments, with `specs` in the order of the files."""
        shards = _shards(dict(specs), shard_bytes)
        self._folder = folder
        self._shards = dict(zip(_file_names(len(shards)), shards, strict=True))

    def create(self) -> None:
        """Create files of their full size, with headers. Raises OSError naming the path."""
        for name, shard in self._shards.items():
            path = self._folder / name
            with naming(path), path.open("wb") as file:
                file.write(_header(shard))
                file.truncate(file.tell() + sum(map(_size, shard.values())))

    def write(self, parts: Iterable[tuple[str, int, Tensor]]) -> None:
        """Write some rows of some tensors: a tensor's name, the first of the rows, and the rows."""
        places: dict[str, tuple[Path, int, Spec]] = {}
        for name, shard in self._shards.items():
            at = len(_header(shard))
            for tensor, spec in shard.items():
                places[tensor] = self._folder / name, at, spec
                at += _size(spec)
        for tensor, first, rows in parts:
            path, at, spec = places[tensor]
            row = _size(spec) // max(spec.shape[0], 1) if spec.shape else 0
            with naming(path), path.open("r+b") as file:
                file.seek(at + first * row)
                file.write(_bytes_of(rows, spec.dtype))

    def finish(self) -> None:
        """Write the list of the files, if there are several."""
        if len(self._shards) > 1:
            write_index(self._folder, self._shards)


def write_index(folder: Path, shards: Mapping[str, Mapping[str, Spec]]) -> None:
    """Write the list of the file of each tensor."""
    total = sum(_size(spec) for shard in shards.values() for spec in shard.values())
    places = {name: file for file, shard in shards.items() for name in shard}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _header(specs: Mapping[str, Spec]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + _size(spec)
        header[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    flat = tensor.detach().to("cpu", dtype).reshape(-1).view(torch.uint8)
    return flat.numpy().data


DEFAULT_SHARD_BYTES = 5 * 10**9
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int], None]
"""Called with the written bytes and the total."""


def write_model(
    source: Source,
    names: Iterable[str],
    hf: Path,
    *,
    dtype: torch.dtype | None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write the named tensors of a source to a folder, replacing its weights.

    `dtype` is that of the written floating-point tensors; None: as they are stored. A tensor larger
    than `shard_bytes` has a separate file. Raises ValueError naming what cannot be read, OSError
    naming the path that cannot be written.
    """
    specs = {name: as_written(source.specs[name], dtype) for name in names}
    shards = _shards(specs, shard_bytes)
    total = sum(_size(spec) for spec in specs.values())
    files = _file_names(len(shards))
    written = 0

    def filled(shard: dict[str, Spec]) -> Iterator[Tensor]:
        nonlocal written
        for name, spec in shard.items():
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
            source.fill(name, tensor)
            yield tensor
            written += _size(spec)
            if progress:
                progress(written, total)

    temporary = beside(hf / "weights")
    try:
        with naming(hf):
            temporary.mkdir(parents=True)
            for file, shard in zip(files, shards, strict=True):
                write_tensors(temporary / file, shard, filled(shard))
                sync(temporary / file)
            for stale in [*hf.glob("*.safetensors"), hf / INDEX]:
                stale.unlink(missing_ok=True)
            for file in files:
                os.replace(temporary / file, hf / file)
            sync(hf)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if len(shards) > 1:
        write_index(hf, dict(zip(files, shards, strict=True)))


def sizes_of(
    specs: Mapping[str, Spec], dtype: torch.dtype, shard_bytes: float = DEFAULT_SHARD_BYTES
) -> dict[str, int]:
    """Return names and sizes of the files that `write_model` would write."""
    shards = _shards({name: as_written(spec, dtype) for name, spec in specs.items()}, shard_bytes)
    sizes = (len(_header(shard)) + sum(map(_size, shard.values())) for shard in shards)
    return dict(zip(_file_names(len(shards)), sizes, strict=True))


def as_written(spec: Spec, dtype: torch.dtype | None) -> Spec:
    """Return the spec of a tensor in files of a dtype, which only floating-point ones take on."""
    return Spec(spec.shape, dtype if dtype and spec.dtype.is_floating_point else spec.dtype)


def _size(spec: Spec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _shards(specs: dict[str, Spec], most: float) -> list[dict[str, Spec]]:
    shards: list[dict[str, Spec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + _size(spec) > most:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += _size(spec)
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]

"""Write: a model's weights from any source, with one tensor in memory at a time.

A `Source` has the tensors of a trained model by their Hugging Face names, wherever they are stored.
All files are written under temporary names first: old ones stay until the new ones are whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trireme.checkpoint.export import (
    DEFAULT_SHARD_BYTES,
    Spec,
    as_written,
    bytes_of,
    file_names,
    header_of,
    shards_of,
    write_index,
)
from trireme.config.lookup import INDEX
from trireme.files import naming, sync, temporary_name


class Source(Protocol):
    """Tensors that are read one at a time, each into a tensor made for it."""

    specs: dict[str, Spec]

    def fill(self, name: str, out: Tensor) -> None:
        """Copy a tensor into one of its shape and any dtype. Raises ValueError naming its file."""
        ...


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
    shards = shards_of(specs, shard_bytes)
    total = sum(spec.num_bytes for spec in specs.values())
    files = file_names(len(shards))
    written = 0

    def filled(shard: dict[str, Spec]) -> Iterator[Tensor]:
        nonlocal written
        for name, spec in shard.items():
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
            source.fill(name, tensor)
            yield tensor
            written += spec.num_bytes
            if progress:
                progress(written, total)

    temporary = temporary_name(hf / "weights")
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
    shards = shards_of({name: as_written(spec, dtype) for name, spec in specs.items()}, shard_bytes)
    sizes = (len(header_of(s)) + sum(spec.num_bytes for spec in s.values()) for s in shards)
    return dict(zip(file_names(len(shards)), sizes, strict=True))


def write_tensors(path: Path, specs: Mapping[str, Spec], tensors: Iterable[Tensor]) -> None:
    """Write one safetensors file with tensors in the order of `specs`, each made when it is
    written.

    Sorted names give the bytes of `write_weights`.
    """
    with naming(path), path.open("wb") as file:
        file.write(header_of(specs))
        for spec, tensor in zip(specs.values(), tensors, strict=True):
            file.write(bytes_of(tensor, spec.dtype))

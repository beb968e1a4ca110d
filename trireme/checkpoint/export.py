"""Export: writes a model as safetensors, tensor by tensor, so that one tensor is held at a time.

Past a size there are several files and an index, as `save_pretrained` names them. All of them are
written beside their places first: what was there before stays until the new files are whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from trireme.checkpoint.source import DTYPES, Source, Spec
from trireme.config.weights import INDEX
from trireme.files import beside, naming, sync, write_json

DEFAULT_SHARD_BYTES = 5 * 10**9
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int], None]
"""Told bytes written and bytes in all."""


def write_model(
    source: Source,
    names: Iterable[str],
    hf: Path,
    *,
    dtype: torch.dtype | None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Put the named tensors of a source into a folder, in place of the weights that it has.

    `dtype` is what floating-point tensors become; None: as they are stored. A tensor larger than
    `shard_bytes` has a file of its own.
    Raises ValueError naming what cannot be read, OSError naming the path that cannot be written.
    """
    specs = {name: _as_written(source.specs[name], dtype) for name in names}
    shards = _shards(specs, shard_bytes)
    total = sum(_size(spec) for spec in specs.values())
    files = _file_names(len(shards))
    written = 0

    def advance(count: int) -> None:
        nonlocal written
        written += count
        if progress:
            progress(written, total)

    temporary = beside(hf / "weights")
    try:
        with naming(hf):
            temporary.mkdir(parents=True)
            for file, shard in zip(files, shards, strict=True):
                _write_file(temporary / file, source, shard, advance)
            for stale in [*hf.glob("*.safetensors"), hf / INDEX]:
                stale.unlink(missing_ok=True)
            for file in files:
                os.replace(temporary / file, hf / file)
            sync(hf)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if len(shards) > 1:
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        write_json(hf / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _as_written(spec: Spec, dtype: torch.dtype | None) -> Spec:
    return Spec(spec.shape, dtype if dtype and spec.dtype.is_floating_point else spec.dtype)


def _size(spec: Spec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _shards(specs: dict[str, Spec], most: int) -> list[dict[str, Spec]]:
    """Tensors by file, in their order."""
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


def _write_file(
    path: Path, source: Source, shard: dict[str, Spec], advance: Callable[[int], None]
) -> None:
    """The header, which says where each tensor will lie, then the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in shard.items():
        begin, end = end, end + _size(spec)
        header[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, spec in shard.items():
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
            source.fill(name, tensor)
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            advance(_size(spec))
    sync(path)

"""Weights: which tensors the safetensors files of a folder hold, told from their headers."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
Shape = tuple[int, ...]


def model_shapes(folder: Path) -> dict[str, Shape]:
    """Name and shape of every tensor of a model.

    Raises ValueError where a file is not as long as its header says, or an index names a tensor
    that is not there.
    """
    shapes: dict[str, Shape] = {}
    for path in weight_files(folder):
        try:
            shapes |= read_shapes(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path.name}: {error}") from error
    index = folder / INDEX
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if missing := sorted(set(listed) - set(shapes)):
            raise ValueError(f"{listed[missing[0]]} with tensor {missing[0]} is missing")
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    return sorted(folder.glob("*.safetensors"))


def read_shapes(path: Path) -> dict[str, Shape]:
    """Name and shape of every tensor of a file, from its header. Raises ValueError if it is cut."""
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        text = file.read(length) if 0 < length < 2**30 else b""
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError("is no safetensors file, or a cut one") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if os.path.getsize(path) != 8 + length + end:
        raise ValueError(f"has {os.path.getsize(path)} bytes instead of {8 + length + end}")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}

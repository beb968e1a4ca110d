"""Stream: one safetensors file written tensor by tensor, so that they are never all in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trireme.files import naming

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_stream(
    path: Path, shapes: Mapping[str, torch.Size], dtype: torch.dtype, tensors: Iterable[Tensor]
) -> None:
    """The tensors in the order of `shapes`. Sorted names give the bytes of `write_weights`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with naming(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            flat = tensor.detach().to("cpu", dtype).reshape(-1).view(torch.uint8)
            file.write(flat.numpy().tobytes())

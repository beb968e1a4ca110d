"""Source: the tensors of a trained model by their Hugging Face names, wherever they lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from trireme.config.weights import Shape

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""What safetensors calls each dtype."""


@dataclass(frozen=True)
class Spec:
    """What a tensor will be, known before it is read."""

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

"""Reader: finds and reads the weights of another trainer's checkpoint.

Each format of a checkpoint is a class by its name in READERS, and is recognized by the files of a
folder. Manifests list them, so that each can be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trireme.config.lookup import Shape
from trireme.ext.converters.write import Source
from trireme.registry import READERS


class Reader(Protocol):
    """Reads one format of checkpoint. Its class is called without arguments."""

    form: str
    """The names of its files, as in the error `there is no … in FOLDER`."""
    mark: str | None
    """The file by which any folder is recognized as such a checkpoint; None: by its place alone."""
    beside_own: bool
    """Whether these weights are read even next to a `model.safetensors`, which is only a copy."""

    def find(self, folder: Path) -> list[Path]:
        """Find the files in a checkpoint's folder; an empty list if it has no such weights.

        Raises ValueError if some are missing, or if several sets of them could be meant.
        """
        ...

    def open(
        self, files: Sequence[Path], config: Mapping[str, Any], expected: Mapping[str, Shape] | None
    ) -> Source:
        """Open the tensors of such files. `config` is the model's config.json, and `expected` the
        shapes of its tensors, if known. Raises ValueError for files that cannot be read.
        """
        ...


@dataclass(frozen=True)
class Weights:
    """The files of one checkpoint, and their reader."""

    reader: Reader
    files: list[Path]


def readers() -> list[Reader]:
    """Make a reader of every format, in the order in which they are tried."""
    return [READERS[name]() for name in READERS]


def weights_in(folder: Path, *, beside_own: bool) -> Weights | None:
    """Find the weights of another trainer in a folder; None if there are none.

    `beside_own`: a `model.safetensors` is there, which has precedence over most forms.
    """
    for reader in readers():
        if (reader.beside_own or not beside_own) and (files := reader.find(folder)):
            return Weights(reader, files)
    return None

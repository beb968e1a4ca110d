"""Reader: finds and reads the weights of another trainer's checkpoint.

Each form of a checkpoint is a class by its name in READERS, found by the files of a folder.
Manifests list them, so that each can be left out.
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
    """One form of checkpoint. Its class is called without arguments."""

    form: str
    """Its files, for the sentence `there is no … in FOLDER`."""
    mark: str | None
    """The file that makes any folder a checkpoint of this form; None: it is in a step's folder."""
    beside_own: bool
    """Whether a `model.safetensors` next to such weights is only a copy, and these are read."""

    def find(self, folder: Path) -> list[Path]:
        """Find the files in a checkpoint's folder; none if it has no such weights.

        Raises ValueError if some are missing, or if it is ambiguous which are meant.
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
    """Make a reader of every form, in the order in which they are tried."""
    return [READERS[name]() for name in READERS]


def weights_in(folder: Path, *, beside_own: bool) -> Weights | None:
    """Find the weights of another trainer in a folder; None if there are none.

    `beside_own`: a `model.safetensors` is there, which has precedence over most forms.
    """
    for reader in readers():
        if (reader.beside_own or not beside_own) and (files := reader.find(folder)):
            return Weights(reader, files)
    return None

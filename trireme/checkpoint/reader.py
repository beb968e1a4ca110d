"""Reader: how the weights of another trainer's checkpoint are found and read.

Each form of a checkpoint is a class by its name in READERS, found by the files of a folder. Which
of them there are stands in manifests, so that each can be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trireme.checkpoint.export import Shape, Source
from trireme.registry import READERS


class Reader(Protocol):
    """One form of checkpoint. Its class is called without arguments."""

    form: str
    """The files that it has, for the sentence `there is no … in FOLDER`."""
    mark: str | None
    """The file that makes any folder a checkpoint of this form; None: it lies in a step's."""
    beside_own: bool
    """Whether a `model.safetensors` beside such weights is a copy of them, and these are read."""

    def find(self, folder: Path) -> list[Path]:
        """The files in a checkpoint's folder; none where it has no such weights.

        Raises ValueError where some are missing, or where it is open which are meant.
        """
        ...

    def open(
        self, files: Sequence[Path], config: Mapping[str, Any], expected: Mapping[str, Shape] | None
    ) -> Source:
        """The tensors of such files. `config` is the model's config.json, and `expected` are the
        shapes of its tensors, where they are known. Raises ValueError for what cannot be read.
        """
        ...


@dataclass(frozen=True)
class Weights:
    """The files of one checkpoint, and what reads them."""

    reader: Reader
    files: list[Path]


def readers() -> list[Reader]:
    """A reader of every form, in the order in which they are tried."""
    return [READERS[name]() for name in READERS]


def weights_in(folder: Path, *, beside_own: bool) -> Weights | None:
    """The weights of another trainer in a folder; None where there are none.

    `beside_own`: a `model.safetensors` is there, which most forms stand back for.
    """
    for reader in readers():
        if (reader.beside_own or not beside_own) and (files := reader.find(folder)):
            return Weights(reader, files)
    return None

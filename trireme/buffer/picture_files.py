"""Picture files: the pictures of a job's experiences, for people to look at: one file for each,
`buffer/pictures/<digest>`, however many experiences show it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from trireme.buffer.limit import SHARE
from trireme.files import write_bytes
from trireme.pictures import Picture

FOLDER = "pictures"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class PictureFiles:
    """The folder, and what it holds."""

    def __init__(self, folder: Path, limit: float = math.inf) -> None:
        """`folder` is that of the job's stores; `limit`: bytes of all files (the oldest go)."""
        self._folder = folder / FOLDER
        self._limit = limit
        self._sizes: dict[str, int] | None = None
        """By digest, the oldest first; None: not yet read."""

    def add(self, pictures: Iterable[Picture]) -> None:
        """Write the pictures that are not there yet."""
        for picture in pictures:
            if self._sizes is None:
                self._sizes = self._read()
            if picture.digest not in self._sizes:
                write_bytes(self._folder / picture.digest, picture.data)
                self._sizes[picture.digest] = len(picture.data)
                self._trim(self._sizes)

    def _read(self) -> dict[str, int]:
        self._folder.mkdir(parents=True, exist_ok=True)
        found = [(p.stat(), p.name) for p in self._folder.iterdir() if _DIGEST.fullmatch(p.name)]
        found.sort(key=lambda one: one[0].st_mtime_ns)
        return {name: state.st_size for state, name in found}

    def _trim(self, sizes: dict[str, int]) -> None:
        total = sum(sizes.values())
        if total <= self._limit:
            return
        for digest in [*sizes]:
            if total <= SHARE * self._limit:
                return
            (self._folder / digest).unlink(missing_ok=True)
            total -= sizes.pop(digest)


def picture_bytes(folder: Path, digest: str) -> bytes:
    """Return a picture of a job's folder of stores; nothing of one that has gone past the limit."""
    path = picture_file(folder, digest)
    return b"" if path is None else path.read_bytes()


def picture_file(folder: Path, digest: str) -> Path | None:
    """Return the file of a picture in a job's folder of stores; None if it is not there."""
    path = folder / FOLDER / digest
    return path if _DIGEST.fullmatch(digest) and path.is_file() else None

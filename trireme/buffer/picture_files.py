"""Picture files: the pictures of a job's experiences, for people to look at: one file for each,
`buffer/pictures/<digest>`, however many experiences show it.

Several copies, also of several processes, may write and trim one folder at the same time: each
reads it again before it trims, and writes what another has removed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
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
            path = self._folder / picture.digest
            if picture.digest not in self._sizes or not path.is_file():
                write_bytes(path, picture.data)
                self._sizes[picture.digest] = len(picture.data)
                self._trim()

    def _read(self) -> dict[str, int]:
        self._folder.mkdir(parents=True, exist_ok=True)
        found: list[tuple[int, str, int]] = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another copy trims at this moment
                if _DIGEST.fullmatch(path.name):
                    state = path.stat()
                    found.append((state.st_mtime_ns, path.name, state.st_size))
        return {name: size for _, name, size in sorted(found)}

    def _trim(self) -> None:
        if self._sizes is None or sum(self._sizes.values()) <= self._limit:
            return
        sizes = self._sizes = self._read()
        total = sum(sizes.values())
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

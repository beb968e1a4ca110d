"""Shelf: the pictures that clients have sent to a server, by digest: a picture is sent once, and
named afterwards.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from trireme.cache import SizedCache
from trireme.pictures import Picture

MOST_BYTES = 2 * 2**30
"""Bytes of all pictures of a server; past it the least recently used go."""
UNKNOWN = "picture is not on this server"
"""Part of the error for a picture that was never sent, or has gone since: the client sends it."""


class PictureBody(BaseModel):
    """A picture, as `picture_to_wire` makes it."""

    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    tokens: Annotated[int, Field(ge=1)]
    grid: Annotated[list[int], Field(max_length=4)]
    data: str
    """The file, in base64."""


class Shelf:
    """The pictures of one server."""

    def __init__(self, limit: int = MOST_BYTES) -> None:
        """`limit`: bytes of all pictures."""
        self._pictures: SizedCache[Picture] = SizedCache(limit)

    def put(self, body: PictureBody) -> None:
        """Store a picture. Raises ValueError for data that is not base64."""
        try:
            data = base64.b64decode(body.data, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the request's data is not in base64: {error}") from error
        picture = Picture(data, body.digest, body.tokens, tuple(body.grid))
        self._pictures.put(body.digest, picture, len(data))

    def get(self, digests: Sequence[str]) -> list[Picture]:
        """Return pictures by their digests. Raises ValueError for one that is not here."""
        return [self._get(digest) for digest in digests]

    def _get(self, digest: str) -> Picture:
        if (picture := self._pictures.get(digest)) is None:
            raise ValueError(f"{UNKNOWN}: {digest:.64}")
        return picture

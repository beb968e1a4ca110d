"""Pictures: the table of a buffer's pictures, each once, however many experiences show it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, MetaData, select
from sqlalchemy.dialects import postgresql, sqlite

from trireme.buffer.table import picture_table
from trireme.pictures import Picture

_INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
REMEMBERED = 4096
"""Digests that are known to be in the table, so that they are not sent again."""


class PictureTable:
    """The pictures of one buffer."""

    def __init__(self, name: str, metadata: MetaData) -> None:
        self._table = picture_table(name, metadata)
        self._known: dict[str, None] = {}

    def new(self, pictures: Iterable[Picture]) -> dict[str, bytes]:
        """Return the data of those that are not known to be in the table, by digest."""
        return {p.digest: p.data for p in pictures if p.digest not in self._known}

    def put(self, connection: Connection, new: dict[str, bytes]) -> None:
        """Add pictures; those that another process has added stay as they are."""
        if new:
            rows = [{"digest": digest, "data": data} for digest, data in sorted(new.items())]
            insert = _INSERTS[connection.dialect.name]
            connection.execute(insert(self._table).on_conflict_do_nothing(), rows)

    def note(self, new: Iterable[str]) -> None:
        """Note that these are in the table: their transaction has ended."""
        self._known.update(dict.fromkeys(new))
        for digest in [*self._known][: max(0, len(self._known) - REMEMBERED)]:
            del self._known[digest]

    def get(self, connection: Connection, digest: str) -> bytes | None:
        """Return a picture's data; None if it is not there."""
        column = self._table.c
        return connection.scalar(select(column.data).where(column.digest == digest))

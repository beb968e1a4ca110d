"""Pictures: the table of a buffer's pictures, each once, however many experiences show it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, MetaData, select
from sqlalchemy.dialects import postgresql, sqlite

from trireme.buffer.table import picture_table
from trireme.pictures import KnownPictures, Picture

_INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


class PictureTable:
    """The pictures of one buffer."""

    def __init__(self, name: str, metadata: MetaData) -> None:
        self._table = picture_table(name, metadata)
        self.known = KnownPictures()
        """Those that are in the table, as far as this process knows."""

    def put(self, connection: Connection, pictures: Iterable[Picture]) -> None:
        """Add pictures; those that another process has added stay as they are."""
        rows = [{"digest": each.digest, "data": each.data} for each in pictures]
        if rows:
            insert = _INSERTS[connection.dialect.name]
            rows.sort(key=lambda row: row["digest"])  # processes lock them in one order
            connection.execute(insert(self._table).on_conflict_do_nothing(), rows)

    def get(self, connection: Connection, digest: str) -> bytes | None:
        """Return a picture's data; None if it is not there."""
        column = self._table.c
        return connection.scalar(select(column.data).where(column.digest == digest))

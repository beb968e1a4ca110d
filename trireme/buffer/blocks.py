"""Blocks: where the bytes of a copy's experiences are, and how they are read. Those of a task that
are written together are one block: half the bytes, and half the time, of as many on their own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trireme.experience import Experience
    from trireme.serialize import Stored

TABLE = "experiences"
BLOCKS = "experiences_blocks"
OWNER = "experiences_owner"
"""The table that names the job whose copy a database is."""


def bytes_of(tables: Container[str]) -> str:
    """Return the SQL for the bytes of a row of `TABLE`: those of its block, which have other
    experiences too, or its own in a copy of an earlier version. `tables` are those of the database.
    """
    if BLOCKS not in tables:
        return "experience_bytes"
    block = f"SELECT data FROM {BLOCKS} WHERE {BLOCKS}.id = {TABLE}.block"
    return f"coalesce(({block}), experience_bytes)"


def stored_experiences(
    database: sqlite3.Connection, stored: Stored, where: str = "", values: Sequence[Any] = ()
) -> Iterator[Experience]:
    """Yield the experiences of a copy in a file, the oldest first; `where` is SQL that chooses
    rows, `stored` as of `decode`. Raises Damaged.
    """
    from trireme.serialize import decode  # imports torch

    named = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    column = bytes_of({name for (name,) in named})
    last, block = b"", dict[str, "Experience"]()
    rows = database.execute(f"SELECT msg_id, {column} FROM {TABLE} {where} ORDER BY id", values)
    for eid, data in rows:
        if data != last:  # those of a block usually follow one another
            last, block = data, {e.eid.uid: e for e in decode(data, stored)}
        yield block[eid]

"""Rows: the copy of experiences in a database, one row per id.

The bytes of a task's experiences are together, in a block (blocks.py), which goes with the last of
its rows. Several explorers may write one copy: one at a time, since each may remove rows of all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    Table,
    Text,
    delete,
    func,
    insert,
    make_url,
    select,
)
from sqlalchemy.exc import DatabaseError, DBAPIError

from trireme.buffer import blocks as names
from trireme.buffer.limit import SHARE, cut_file, fitting, note_cut
from trireme.buffer.table import (
    block_table,
    experience_table,
    first_line,
    in_turn,
    is_damaged,
    open_database,
    row_of,
)
from trireme.experience import Experience
from trireme.files import Unreadable, out_of_the_way, usable
from trireme.log import get_logger, hide_passwords
from trireme.serialize import encode_each

logger = get_logger("queue_experience_buffer")

IDS_AT_ONCE = 500
BLOCK_TOKENS = 2**16
"""Tokens from which on a block takes no further experience: who reads one reads all."""
ROW_BYTES = 250
"""Bytes of a row's ids, numbers and indexes."""
Refuse = Callable[[str, str | None, bool], None]
"""`refuse_other` of owner.py for one job: of a copy, its owner, and whether it has experiences."""


class RowTable:
    """A table of experiences, which is made when first written."""

    def __init__(
        self, url: str, limit: float = math.inf, sampled: bool = False, patience: float = 0.0
    ) -> None:
        """`limit`: bytes of all rows; `sampled`: at the limit a sample remains, not the newest;
        `patience`: seconds for which a server that goes away is waited for.
        """
        self._url = url
        self._patience = patience
        self._limit = limit
        self._sampled = sampled
        self._bytes: int | None = None
        """Bytes of the rows; None: not yet counted."""
        self._newest = (0, 0)
        """The newest row and block that are counted; later ones are another process's."""
        self._metadata = MetaData()
        self._table = experience_table(names.TABLE, self._metadata)
        self._table.append_column(Column("block", Integer))
        self._blocks = block_table(names.BLOCKS, self._metadata)
        self._engine: Engine | None = None

    @property
    def path(self) -> Path | None:
        """The database's file; None if it is on a server, or in memory."""
        url = make_url(self._url)
        file = url.database if url.get_backend_name() == "sqlite" else None
        return Path(file) if file else None

    def write(self, experiences: Iterable[Experience], *, pictures: bool) -> None:
        """Add rows, `pictures` too if they are nowhere else; an id's old row goes. Raises OSError
        if the database cannot be written.
        """
        each = {e.eid.uid: e for e in experiences}
        groups = _in_blocks(each.values())
        encoded = encode_each(groups, pictures=pictures)
        rows = {uid: row_of(e, b"") for uid, e in each.items()}

        def write(connection: Connection) -> None:
            self._count_others(connection)
            replaced, ids = 0, list(rows)
            for first in range(0, len(ids), IDS_AT_ONCE):
                same = self._table.c.msg_id.in_(ids[first : first + IDS_AT_ONCE])
                replaced += connection.execute(delete(self._table).where(same)).rowcount
            if replaced:
                self._drop_blocks(connection)
            if rows:
                _, last = self._last(connection)
                blocks = [{"id": n, "data": data} for n, data in enumerate(encoded, last + 1)]
                for block, group in zip(blocks, groups, strict=True):
                    for e in group:
                        rows[e.eid.uid]["block"] = block["id"]
                connection.execute(insert(self._blocks), blocks)
                connection.execute(insert(self._table), list(rows.values()))
            new = sum(map(len, encoded)) + sum(map(_bytes_of, rows.values()))
            self._trim(connection, new)
            if self._bytes is not None:
                self._newest = self._last(connection)

        try:
            self._change(write)
        except DBAPIError as error:
            raise OSError(
                f"the copy of experiences in {hide_passwords(self._url)} cannot be written: "
                f"{error.orig}"
            ) from error

    def claim(self, job: Path, refuse_other: Refuse) -> None:
        """Note that these are the rows of the job in that folder, unless they are refused as
        another's.
        """
        table = Table(names.OWNER, MetaData(), Column("job", Text, nullable=False))

        def claim(connection: Connection) -> None:
            table.create(connection, checkfirst=True)
            owner = connection.scalar(select(table.c.job))
            filled = connection.scalar(select(self._table.c.id).limit(1)) is not None
            copy_ = hide_passwords(self._url)
            refuse_other(copy_, owner, filled)
            connection.execute(delete(table))
            connection.execute(insert(table).values(job=str(job)))

        self._change(claim)

    def rewind(self, step: int) -> None:
        """Remove the rows of explore steps after `step`."""

        def forget(connection: Connection) -> None:
            connection.execute(delete(self._table).where(self._table.c.batch > step))
            self._drop_blocks(connection)

        self._bytes = None
        self._change(forget)
        if step == 0 and self.path is not None:
            cut_file(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the database."""
        if self._engine is not None:
            self._engine.dispose()

    def _open(self) -> Engine:
        if self._engine is None:
            self._engine = open_database(self._url, self._metadata)
        return self._engine

    def _change(self, change: Callable[[Connection], None]) -> None:
        """Make a change in one transaction. A damaged file is renamed: the copy is for people, and
        no run ends because of it.
        """
        path = self.path
        if path is not None and self._engine is None:
            usable(path)
        try:
            self._in_turn(change)
            return
        except (ValueError, DatabaseError) as error:
            broken = error if isinstance(error, DatabaseError) else error.__cause__
            if path is None or not isinstance(broken, DatabaseError) or not is_damaged(broken):
                raise
            if self._engine is not None:
                self._engine.dispose()
            self._engine = self._bytes = None
            for suffix in ("-wal", "-shm"):  # of the file that goes
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            what = Unreadable(f"{path} is damaged ({first_line(broken)})")
            out_of_the_way(path, what, "a copy of experiences begins anew")
        self._in_turn(change)

    def _in_turn(self, change: Callable[[Connection], None]) -> None:
        """Make a change once no other process makes one: the blocks' numbers follow one another,
        and two that removed each other's rows would wait for each other without end. If the server
        goes away, it is made again: all changes may be repeated.
        """
        attempts = count()

        def attempt(connection: Connection) -> None:
            if next(attempts):
                self._bytes = None  # whether the last attempt was made is not known
            change(connection)

        in_turn(self._open(), names.BLOCKS, attempt, patience=self._patience)

    def _last(self, connection: Connection) -> tuple[int, int]:
        """Return the numbers of the newest row and the newest block; 0 if there is none."""
        ids = self._table.c.id, self._blocks.c.id
        row, block = (connection.scalar(select(func.max(column))) or 0 for column in ids)
        return row, block

    def _count_others(self, connection: Connection) -> None:
        """Count what other processes have written since our own last rows."""
        if self._bytes is not None and self._last(connection) != self._newest:
            self._bytes += self._bytes_after(connection, *self._newest)

    def _bytes_after(self, connection: Connection, row: int, block: int) -> int:
        """Return the bytes of the rows and blocks after these."""
        rows = select(func.sum(self._size)).where(self._table.c.id > row)
        blocks = select(func.sum(func.length(self._blocks.c.data)))
        both = rows, blocks.where(self._blocks.c.id > block)
        return sum(int(connection.scalar(query) or 0) for query in both)

    @property
    def _size(self) -> Any:
        """The bytes of a row, without those of its block, in SQL."""
        columns = self._table.c
        size = func.coalesce(func.length(columns.prompt_text), 0) + ROW_BYTES
        size += func.coalesce(func.length(columns.response_text), 0)
        return size + func.length(columns.experience_bytes)

    def _drop_blocks(self, connection: Connection) -> None:
        """Delete the blocks of which no row is left."""
        used = select(self._table.c.block).where(self._table.c.block.is_not(None))
        connection.execute(delete(self._blocks).where(self._blocks.c.id.not_in(used)))

    def _trim(self, connection: Connection, new: int) -> None:
        """Delete rows until the rest fits, `new` bytes of which have just come; the file does not
        grow past its freed pages.
        """
        if self._limit == math.inf:
            return
        columns, data = self._table.c, func.length(self._blocks.c.data)
        if self._bytes is None:
            self._bytes = self._bytes_after(connection, 0, 0)
        else:
            self._bytes += new
        if self._bytes <= self._limit:
            return
        users = select(columns.block, func.count().label("rows")).group_by(columns.block).subquery()
        share = func.coalesce(data / users.c.rows, 0)
        query = (
            select(columns.id, columns.task_id, self._size + share)
            .outerjoin(self._blocks, columns.block == self._blocks.c.id)
            .outerjoin(users, columns.block == users.c.block)
            .order_by(columns.id)
        )
        rows = [(key, group, int(bytes_)) for key, group, bytes_ in connection.execute(query)]
        kept = set(fitting(rows, SHARE * self._limit, sampled=self._sampled))
        gone = [key for key, _, _ in rows if key not in kept]
        for first in range(0, len(gone), IDS_AT_ONCE):
            some = columns.id.in_(gone[first : first + IDS_AT_ONCE])
            connection.execute(delete(self._table).where(some))
        self._drop_blocks(connection)
        self._bytes = sum(bytes_ for key, _, bytes_ in rows if key in kept)
        if self.path is not None:
            note_cut(self.path, len(gone), sampled=self._sampled)
        logger.info("the copy of experiences is at its limit: %d rows went", len(gone))


def _bytes_of(row: dict[str, Any]) -> int:
    return len(row["prompt_text"] or "") + len(row["response_text"] or "") + ROW_BYTES


def _in_blocks(experiences: Iterable[Experience]) -> list[list[Experience]]:
    """Put the experiences of each task together, in several blocks if they are long."""
    blocks: list[list[Experience]] = []
    open_: dict[str, list[Experience]] = {}
    tokens: Counter[str] = Counter()
    for e in experiences:
        task = e.eid.tid
        if task not in open_ or tokens[task] >= BLOCK_TOKENS:
            open_[task], tokens[task] = [], 0
            blocks.append(open_[task])
        open_[task].append(e)
        tokens[task] += len(e.tokens)
    return blocks

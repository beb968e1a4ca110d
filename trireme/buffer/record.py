"""Record: keeps a copy of every experience for people, in a database and as lines of JSON.

Invariants:
- Written by a separate thread, never by the event loop; `flush` waits for it, and its errors are
  raised by the next call.
- One row and one line per id: writing an id again replaces its row, and `rewind` removes the rows
  after the step from which a run resumes.
- A line of JSON has the facts for people; tokens and log-probabilities are in the database.
- Either copy stays within its limit (limit.py).
- The database has the bytes of a task's experiences together, in a block (blocks.py), which goes
  with the last of its rows.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    delete,
    func,
    insert,
    make_url,
    select,
)
from sqlalchemy.exc import DatabaseError

from trireme.buffer.blocks import BLOCKS, TABLE
from trireme.buffer.limit import SHARE, cut_file, fitting, note_cut
from trireme.buffer.lines import LineFile, summary, with_messages
from trireme.buffer.picture_files import PictureFiles
from trireme.buffer.table import (
    block_table,
    experience_table,
    first_line,
    is_damaged,
    one_at_a_time,
    open_database,
    resolve_url,
    row_of,
)
from trireme.experience import Experience
from trireme.files import (
    Unreadable,
    out_of_the_way,
    usable,
)
from trireme.log import get_logger, hide_passwords
from trireme.serialize import encode_each

logger = get_logger("queue_experience_buffer")

IDS_AT_ONCE = 500
BLOCK_TOKENS = 2**16
"""Tokens from which on a block takes no further experience: who reads one reads all."""
ROW_BYTES = 250
"""Bytes of a row's ids, numbers and indexes."""
MOST_PENDING = 8
"""Queued writes before `write` waits."""


class Record:
    """A SQL table, a JSON Lines file, or both."""

    def __init__(
        self,
        *,
        database: str | None = None,
        lines: Path | None = None,
        limit: float = math.inf,
        sampled: bool = False,
        messages: bool = False,
    ) -> None:
        """`database` is a URL, `lines` a `.jsonl` file. Both are made when first written.

        `limit`: bytes of either; `sampled`: at the limit a sample remains, not the newest;
        `messages`: the lines include them.
        """
        self._line = with_messages if messages else summary
        self._limit = limit
        self._sampled = sampled
        self._bytes: int | None = None
        """Bytes of the database's rows; None: not yet counted."""
        self._metadata = MetaData()
        self._table = experience_table(TABLE, self._metadata)
        self._table.append_column(Column("block", Integer))
        self._blocks = block_table(BLOCKS, self._metadata)
        self._database = database
        self._engine: Engine | None = None
        self._lines = LineFile(lines, limit, sampled) if lines is not None else None
        self._path = lines
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="record")
        self._pending: list[Future[None]] = []

    async def write(self, experiences: Sequence[Experience]) -> None:
        """Queue a copy for the thread; waits only if it is far behind."""
        self._collect()
        while len(self._pending) >= MOST_PENDING:
            await asyncio.wrap_future(self._pending.pop(0))
        self.write_soon(experiences)

    def write_soon(self, experiences: Sequence[Experience]) -> None:
        """Queue a copy for the thread, however far behind it is."""
        self._collect()
        copies = [_copy(e) for e in experiences]
        self._pending.append(self._thread.submit(self._write, copies))

    def write_lines(self, lines: Sequence[dict[str, Any]]) -> None:
        """Queue lines for the thread as they are; each has an `eid` and a `step`."""
        self._collect()
        assert self._lines is not None, "this record keeps no lines"
        self._pending.append(self._thread.submit(self._lines.append, list(lines)))

    def rewind(self, step: int) -> None:
        """Remove the rows of explore steps after `step`: a resumed run writes them again."""
        self._pending.append(self._thread.submit(self._rewind, step))
        self.flush()

    def flush(self) -> None:
        """Wait until all is on the disk."""
        while self._pending:
            self._pending.pop(0).result()

    def close(self) -> None:
        """Write the queue, then close files and thread."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            if self._engine is not None:
                self._engine.dispose()

    @cached_property
    def _pictures(self) -> PictureFiles | None:
        """The files of pictures, next to the lines or the database's file; None without either."""
        place = self._path
        if place is None and self._database is not None:
            place = _file_of(make_url(self._database))
        return None if place is None else PictureFiles(place.parent, self._limit)

    def _collect(self) -> None:
        """Drop finished writes; raises the error of a failed one."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()

    def _open(self, url: str) -> Engine:
        if self._engine is None:
            self._engine = open_database(url, self._metadata)
        return self._engine

    def _write(self, experiences: list[Experience]) -> None:
        if self._pictures is not None:
            self._pictures.add(picture for e in experiences for picture in e.pictures)
        if self._database is not None:
            self._write_rows(self._database, experiences)
        if self._lines is not None:
            self._lines.append([self._line(e) for e in experiences])

    def _write_rows(self, url: str, experiences: list[Experience]) -> None:
        whole = self._pictures is None  # otherwise a picture is in its file
        each = {e.eid.uid: e for e in experiences}
        groups = _in_blocks(each.values())
        encoded = encode_each(groups, pictures=whole)
        rows = {uid: row_of(e, b"") for uid, e in each.items()}

        def write(connection: Connection) -> None:
            replaced, ids = 0, list(rows)
            for first in range(0, len(ids), IDS_AT_ONCE):
                same = self._table.c.msg_id.in_(ids[first : first + IDS_AT_ONCE])
                replaced += connection.execute(delete(self._table).where(same)).rowcount
            if replaced:
                self._drop_blocks(connection)
            if rows:
                one_at_a_time(connection, BLOCKS)
                last = connection.scalar(select(func.max(self._blocks.c.id))) or 0
                blocks = [{"id": n, "data": data} for n, data in enumerate(encoded, last + 1)]
                for block, group in zip(blocks, groups, strict=True):
                    for e in group:
                        rows[e.eid.uid]["block"] = block["id"]
                connection.execute(insert(self._blocks), blocks)
                connection.execute(insert(self._table), list(rows.values()))
            self._trim(connection, sum(map(len, encoded)) + sum(map(_bytes_of, rows.values())))

        try:
            self._change(url, write)
        except DatabaseError as error:
            raise OSError(
                f"the copy of experiences in {hide_passwords(url)} cannot be written: {error.orig}"
            ) from error

    def _change(self, url: str, change: Callable[[Connection], None]) -> None:
        """Make a change in one transaction. A damaged file is renamed: the copy is for people, and
        no run ends because of it.
        """
        path = _file_of(make_url(url))
        if path is not None and self._engine is None:
            usable(path)
        try:
            with self._open(url).begin() as connection:
                change(connection)
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
        with self._open(url).begin() as connection:
            change(connection)

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
        size = func.coalesce(func.length(columns.prompt_text), 0) + ROW_BYTES
        size += func.coalesce(func.length(columns.response_text), 0)
        size += func.length(columns.experience_bytes)
        if self._bytes is None:
            both = select(func.sum(size)), select(func.sum(data))
            self._bytes = sum(int(connection.scalar(query) or 0) for query in both)
        else:
            self._bytes += new
        if self._bytes <= self._limit:
            return
        users = select(columns.block, func.count().label("rows")).group_by(columns.block).subquery()
        share = func.coalesce(data / users.c.rows, 0)
        query = (
            select(columns.id, columns.task_id, size + share)
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
        if (copy_ := _file_of(connection.engine.url)) is not None:
            note_cut(copy_, len(gone), sampled=self._sampled)
        logger.info("the copy of experiences is at its limit: %d rows went", len(gone))

    def _rewind(self, step: int) -> None:
        self._bytes = None
        if self._database is not None:

            def forget(connection: Connection) -> None:
                connection.execute(delete(self._table).where(self._table.c.batch > step))
                self._drop_blocks(connection)

            self._change(self._database, forget)
            if step == 0 and (copy_ := _file_of(make_url(self._database))) is not None:
                cut_file(copy_).unlink(missing_ok=True)
        if self._lines is not None:
            self._lines.rewind(step)


def _file_of(url: URL) -> Path | None:
    path = url.database if url.get_backend_name() == "sqlite" else None
    return Path(path) if path else None


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


def record_for(path: str | None, folder: Path, **limits: Any) -> Record:
    """Make the copy that a buffer's `path` asks for: lines in `folder`, rows if it is a database.

    The lines' file has a fixed name, whatever the buffer's name is: seed 003 lists it so.
    """
    lines = folder / "experience_buffer.jsonl"
    if not path:  # YAMLs write "" too
        return Record(lines=lines, **limits)
    if path.endswith((".jsonl", ".json")):
        return Record(lines=folder / path, **limits)
    return Record(database=resolve_url(path, folder), lines=lines, **limits)


def _copy(experience: Experience) -> Experience:
    """Copy an experience, so that later changes of the original do not affect it."""
    out = copy.copy(experience)
    out.info, out.metrics = dict(experience.info), dict(experience.metrics)
    return out

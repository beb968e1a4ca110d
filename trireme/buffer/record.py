"""Record: keeps a copy of every experience for people, in a database and as lines of JSON.

Invariants:
- Written by a separate thread, never by the event loop; `flush` waits for it, and its errors are
  raised by the next call.
- One row and one line per id: writing an id again replaces its row, and `rewind` removes the rows
  after the step from which a run resumes.
- A line of JSON has the facts for people; tokens and log-probabilities are in the database.
- A copy past its limit is cut to nine tenths of it: by age, or group by group by a hash of the
  group's id, so that a sample of all steps remains. A file next to it records how much was removed.
"""

from __future__ import annotations

import asyncio
import copy
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, MetaData, delete, func, insert, make_url, select
from sqlalchemy.exc import DatabaseError

from trireme.buffer.table import (
    batch_number,
    experience_table,
    first_line,
    is_damaged,
    open_database,
    resolve_url,
    row_of,
)
from trireme.experience import EID, Experience
from trireme.files import (
    Unreadable,
    for_appending,
    json_or,
    out_of_the_way,
    read_json,
    read_jsonl,
    usable,
    whole_lines,
    write_json,
    write_text,
)
from trireme.log import get_logger, hide_passwords
from trireme.text import as_json

logger = get_logger("queue_experience_buffer")

TABLE = "experiences"
IDS_AT_ONCE = 500
KEPT_SHARE = 0.9
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
        self._database = database
        self._engine: Engine | None = None
        self._lines = _LineFile(lines, limit, sampled) if lines is not None else None
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

    def _collect(self) -> None:
        """Drop finished writes; raises the error of a failed one."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()

    def _open(self, url: str) -> Engine:
        if self._engine is None:
            self._engine = open_database(url, self._metadata)
        return self._engine

    def _write(self, experiences: list[Experience]) -> None:
        if self._database is not None:
            self._write_rows(self._database, experiences)
        if self._lines is not None:
            self._lines.append([self._line(e) for e in experiences])

    def _write_rows(self, url: str, experiences: list[Experience]) -> None:
        rows = list({e.eid.uid: row_of(e) for e in experiences}.values())

        def write(connection: Connection) -> None:
            ids = [row["msg_id"] for row in rows]
            for first in range(0, len(ids), IDS_AT_ONCE):
                same = self._table.c.msg_id.in_(ids[first : first + IDS_AT_ONCE])
                connection.execute(delete(self._table).where(same))
            if rows:
                connection.execute(insert(self._table), rows)
            self._trim(connection, rows)

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
            for beside in ("-wal", "-shm"):  # of the file that goes
                path.with_name(path.name + beside).unlink(missing_ok=True)
            what = Unreadable(f"{path} is damaged ({first_line(broken)})")
            out_of_the_way(path, what, "a copy of experiences begins anew")
        with self._open(url).begin() as connection:
            change(connection)

    def _trim(self, connection: Connection, new: list[dict[str, Any]]) -> None:
        """Delete rows until the rest fits; the file does not grow past its freed pages."""
        if self._limit == math.inf:
            return
        columns = self._table.c
        size = func.coalesce(func.length(columns.prompt_text), 0) + ROW_BYTES
        size += func.coalesce(func.length(columns.response_text), 0)
        size += func.length(columns.experience_bytes)
        if self._bytes is None:
            self._bytes = int(connection.scalar(select(func.sum(size))) or 0)
        else:
            self._bytes += sum(_bytes_of(row) for row in new)
        if self._bytes <= self._limit:
            return
        query = select(columns.id, columns.task_id, size).order_by(columns.id)
        rows = [(key, group, int(bytes_)) for key, group, bytes_ in connection.execute(query)]
        kept = set(_fitting(rows, KEPT_SHARE * self._limit, sampled=self._sampled))
        gone = [key for key, _, _ in rows if key not in kept]
        for first in range(0, len(gone), IDS_AT_ONCE):
            some = columns.id.in_(gone[first : first + IDS_AT_ONCE])
            connection.execute(delete(self._table).where(some))
        self._bytes = sum(bytes_ for key, _, bytes_ in rows if key in kept)
        if (copy_ := _file_of(connection.engine.url)) is not None:
            _note_cut(copy_, len(gone), sampled=self._sampled)
        logger.info("the copy of experiences is at its limit: %d rows went", len(gone))

    def _rewind(self, step: int) -> None:
        self._bytes = None
        if self._database is not None:

            def forget(connection: Connection) -> None:
                connection.execute(delete(self._table).where(self._table.c.batch > step))

            self._change(self._database, forget)
            if step == 0 and (copy_ := _file_of(make_url(self._database))) is not None:
                _cut_file(copy_).unlink(missing_ok=True)
        if self._lines is not None:
            self._lines.rewind(step)


class _LineFile:
    """A JSON Lines file with one line per id."""

    def __init__(self, path: Path, limit: float = math.inf, sampled: bool = False) -> None:
        self._path = path
        self._limit = limit
        self._sampled = sampled
        self._ids: set[str] | None = None

    def append(self, new: list[dict[str, Any]]) -> None:
        """Add lines; an id's old line is removed."""
        lines = {line["eid"]: line for line in new}
        ids = self._known()
        if ids & lines.keys():
            self.keep(lambda line: line["eid"] not in lines)
            ids = self._known()
        with for_appending(self._path) as file:
            file.write(_text(lines.values()).encode())
            size = file.tell()
        ids.update(lines)
        if size > self._limit:
            self._trim()

    def _trim(self) -> None:
        groups = ((line["eid"], line["eid"].rsplit("/", 2)[0], line) for line in self._read())
        rows = [(eid, group, len(_text([line]).encode())) for eid, group, line in groups]
        kept = set(_fitting(rows, KEPT_SHARE * self._limit, sampled=self._sampled))
        self.keep(lambda line: line["eid"] in kept)
        _note_cut(self._path, len(rows) - len(kept), sampled=self._sampled)

    def rewind(self, step: int) -> None:
        """Keep the lines up to `step`; at 0 there is nothing to keep or cut."""
        self.keep(lambda line: line["step"] <= step)
        if step == 0:
            _cut_file(self._path).unlink(missing_ok=True)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file with the wanted lines; a half-written line is dropped too."""
        lines = [line for line in self._read() if wanted(line)]
        self._ids = {line["eid"] for line in lines}
        write_text(self._path, _text(lines))

    def _known(self) -> set[str]:
        if self._ids is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._ids = {line["eid"] for line in self._read()}
        return self._ids

    def _read(self) -> list[dict[str, Any]]:
        return read_jsonl(self._path, eid=str, step=int) if whole_lines(self._path) else []


def _fitting(rows: Sequence[tuple[Any, str, int]], limit: float, *, sampled: bool) -> Iterator[Any]:
    """Yield the keys of the rows (key, group, bytes; oldest first) that remain within `limit`
    bytes.
    """
    order = list(reversed(rows))
    if sampled:  # a group's rank is the same at every cut: removed groups stay away
        order.sort(key=lambda row: zlib.crc32(row[1].encode()))
    left = limit
    for key, _, size in order:
        left -= size
        if left < 0:
            return
        yield key


def _file_of(url: URL) -> Path | None:
    path = url.database if url.get_backend_name() == "sqlite" else None
    return Path(path) if path else None


def _cut_file(copy_: Path) -> Path:
    return copy_.with_name(f"{copy_.name}.cut.json")


def _note_cut(copy_: Path, gone: int, *, sampled: bool) -> None:
    path = _cut_file(copy_)
    before = json_or(path, dict[str, Any]()).get("gone")
    gone += before if isinstance(before, int) else 0
    write_json(path, {"gone": gone, "left": "sampled" if sampled else "newest"})


def what_is_cut(copy_: Path) -> str | None:
    """Describe what is missing from a copy past its limit, as a sentence; None if it was
    not cut.
    """
    try:
        cut = read_json(_cut_file(copy_))
    except FileNotFoundError:
        return None
    left = "the newest" if cut.get("left") == "newest" else "a sample of whole groups"
    return (
        f"this copy was cut at its limit (data_processor.experience_pipeline.copy_limit_mb): "
        f"{cut.get('gone')} experiences are gone, {left} stayed"
    )


def _bytes_of(row: dict[str, Any]) -> int:
    texts = (row["prompt_text"], row["response_text"])
    return len(row["experience_bytes"]) + sum(len(text or "") for text in texts) + ROW_BYTES


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


def summary(experience: Experience) -> dict[str, Any]:
    """Return the facts about an experience that a person may want to read."""
    return {
        "eid": experience.eid.uid,
        "step": batch_number(experience.eid),
        "reward": experience.reward,
        "prompt": experience.prompt_text,
        "response": experience.response_text,
        "prompt_length": experience.prompt_length,
        "response_length": experience.response_length,
        "trained_tokens": experience.trained_tokens,
        "model_version": experience.version,
        "stop_reason": experience.stop_reason,
        "truncate_status": experience.truncate_status,
        "metrics": experience.metrics,
        "info": experience.info,
    }


def with_messages(experience: Experience) -> dict[str, Any]:
    """Return the summary with the conversation, for readers without the database."""
    turns = {"messages": experience.messages, "tools": experience.tools}
    return summary(experience) | {name: value for name, value in turns.items() if value}


def data_lines(step: int, experiences: Iterable[Experience]) -> list[dict[str, Any]]:
    """Return the rows of a data set that a train step learned from; for a pair one line per
    reply.
    """
    lines: list[dict[str, Any]] = []
    for e in experiences:
        line = summary(e) | {"step": step, "model_version": None}
        if e.chosen is None or e.rejected is None:
            lines.append(line)
            continue
        for run, (name, reply) in enumerate((("chosen", e.chosen), ("rejected", e.rejected))):
            eid = EID(e.eid.batch, e.eid.task, run, e.eid.step, e.eid.suffix).uid
            line = line | {"eid": eid, "response": e.info[name], "info": {"reply": name}}
            lines.append(line | {"response_length": len(reply), "trained_tokens": len(reply)})
    return lines


def _text(lines: Iterable[dict[str, Any]]) -> str:
    return "".join(as_json(line) + "\n" for line in lines)


def _copy(experience: Experience) -> Experience:
    """Copy an experience, so that later changes of the original do not affect it."""
    out = copy.copy(experience)
    out.info, out.metrics = dict(experience.info), dict(experience.metrics)
    return out

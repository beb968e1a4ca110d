"""Record: keeps a copy of every experience for people, in a database and as lines of JSON.

Invariants:
- Written by a separate thread, never by the event loop; `flush` and `flushed` wait for it, and its
  errors are raised by the next call.
- One row and one line per id: writing an id again replaces its row, and `rewind` removes the rows
  after the step from which a run resumes.
- A line of JSON has the facts for people; tokens and log-probabilities are in the database.
- Either copy stays within its limit (limit.py).
- One outside the job's folder belongs to one job, and a second is refused (owner.py).
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from trireme.buffer.lines import LineFile, summary, with_messages
from trireme.buffer.owner import refuse_other
from trireme.buffer.picture_files import PictureFiles
from trireme.buffer.rows import RowTable
from trireme.buffer.table import resolve_url
from trireme.experience import Experience

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
        patience: float = 0.0,
    ) -> None:
        """`database` is a URL, `lines` a `.jsonl` file. Both are made when first written.

        `limit`: bytes of either; `sampled`: at the limit a sample remains, not the newest;
        `messages`: the lines include them; `patience`: seconds for which a database's server that
        goes away is waited for.
        """
        self._line = with_messages if messages else summary
        self._limit = limit
        self._rows = None if database is None else RowTable(database, limit, sampled, patience)
        self._lines = LineFile(lines, limit, sampled) if lines is not None else None
        self._path = lines
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="record")
        self._pending: list[Future[None]] = []

    async def write(self, experiences: Sequence[Experience]) -> None:
        """Queue a copy for the thread; waits only if it is far behind."""
        self._collect()
        while len(self._pending) >= MOST_PENDING:
            await _ended(self._pending[0])
            self._collect()
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

    def claim(self, job: Path, *, key: str, resumes: bool) -> None:
        """Make the copy, named by `key` of the YAML, that of the job in folder `job`. Raises
        ValueError if it lies outside that folder and is another job's.
        """
        self._pending.append(self._thread.submit(self._claim, job.resolve(), key, resumes))
        self.flush()

    def rewind(self, step: int) -> None:
        """Remove the rows of explore steps after `step`: a resumed run writes them again."""
        self._pending.append(self._thread.submit(self._rewind, step))
        self.flush()

    def flush(self) -> None:
        """Wait until all is on the disk."""
        while self._pending:
            self._pending.pop(0).result()

    async def flushed(self) -> None:
        """Wait until all that is queued by now is on the disk, while the event loop goes on: the
        server of a database may be away.
        """
        for write in [*self._pending]:
            await _ended(write)
        self._collect()

    def close(self) -> None:
        """Write the queue, then close files and thread."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            if self._rows is not None:
                self._rows.close()

    @cached_property
    def _pictures(self) -> PictureFiles | None:
        """The files of pictures, next to the lines or the database's file; None without either."""
        place = self._path
        if place is None and self._rows is not None:
            place = self._rows.path
        return None if place is None else PictureFiles(place.parent, self._limit)

    def _collect(self) -> None:
        """Drop finished writes; raises the error of a failed one."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()

    def _write(self, experiences: list[Experience]) -> None:
        if self._pictures is not None:
            self._pictures.add(picture for e in experiences for picture in e.pictures)
        if self._rows is not None:
            self._rows.write(experiences, pictures=self._pictures is None)
        if self._lines is not None:
            self._lines.append([self._line(e) for e in experiences])

    def _claim(self, job: Path, key: str, resumes: bool) -> None:
        refuse = partial(refuse_other, job=job, key=key, resumes=resumes)
        copies = (self._rows, self._rows and self._rows.path), (self._lines, self._path)
        for copy_, path in copies:
            if copy_ is not None and not (path and path.resolve().is_relative_to(job)):
                copy_.claim(job, refuse)

    def _rewind(self, step: int) -> None:
        if self._rows is not None:
            self._rows.rewind(step)
        if self._lines is not None:
            self._lines.rewind(step)


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


async def _ended(write: Future[None]) -> None:
    """Wait for a write; `_collect` raises its error. Who waits may be cancelled: the write is not,
    which would leave it out.
    """
    with suppress(Exception):
        await asyncio.shield(asyncio.wrap_future(write))


def _copy(experience: Experience) -> Experience:
    """Copy an experience, so that later changes of the original do not affect it."""
    out = copy.copy(experience)
    out.info, out.metrics = dict(experience.info), dict(experience.metrics)
    return out

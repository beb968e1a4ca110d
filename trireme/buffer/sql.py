"""SqlBuffer: carries experiences through a database, between two commands on one job folder.

Invariants:
- A put is one transaction of whole groups; a group that is there already is not put again, so
  that an explorer may repeat a step after a crash.
- A take claims its rows in one transaction, so that several readers never share one. A claim
  becomes final with `commit`; `load_state` makes final what its checkpoint holds and gives back
  all else that this reader had claimed.
- Who has closed or failed stands in the table of parties, where the other process sees it.
  Opening a buffer as a party takes back what that party's last process had said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection, MetaData, func, insert, select, update

from trireme.buffer.buffer import Closed
from trireme.buffer.parties import Parties
from trireme.buffer.table import experience_table, open_database, row_of
from trireme.buffer.waiting import Bell, Clock, WallClock
from trireme.experience import Experience, group_by
from trireme.log import get_logger
from trireme.serialize import decode

logger = get_logger("queue_experience_buffer")

Role = Literal["explore", "train", "both"]
Result = TypeVar("Result")

POLL_FIRST, POLL_LONGEST = 0.05, 1.0
"""Seconds between two looks at the database; each look without news doubles them."""
CHUNK = 500
"""Ids in one statement: databases limit the number of parameters."""


class SqlBuffer:
    """A table of experiences and a table of who uses it."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        role: Role = "both",
        party: str | None = None,
        capacity: int = 10000,
        max_read_timeout: float = 1800.0,
        clock: Clock | None = None,
    ) -> None:
        """`role` is what this process does with the buffer, `party` its name among several.

        `capacity` counts explore steps that lie untaken. Raises ValueError where the database
        cannot be opened.
        """
        self.name = name
        self._capacity = capacity
        self._timeout = max_read_timeout
        self._clock = clock or WallClock()
        self._bell = Bell(self._clock)
        self._metadata = MetaData()
        self._rows = experience_table(name, self._metadata)
        roles = ("explore", "train") if role == "both" else (role,)
        self._parties = Parties(
            f"{name}_parties", self._metadata, name=party or "default", roles=roles
        )
        self._database = open_database(url, self._metadata)
        self._failure: BaseException | None = None
        self._taken: list[int] = []
        with self._database.begin() as connection:
            self._parties.enter(connection)
            if "train" in roles:
                self._release(connection)

    async def put(self, experiences: Sequence[Experience]) -> None:
        """See Buffer. Raises TimeoutError when nothing is taken for `max_read_timeout` seconds."""

        def full() -> str:
            return (
                f"buffer '{self.name}' is full ({self._capacity} explore steps) and the trainer "
                f"took nothing for {self._timeout:g} s (max_read_timeout)"
            )

        rows = await asyncio.to_thread(lambda: [row_of(e) for e in experiences])
        groups = list(group_by(experiences, "task"))
        await self._poll(lambda connection: self._try_put(connection, rows, groups), full)
        self._bell.ring()

    async def take(self, n: int) -> list[Experience]:
        """See Buffer."""

        def waited_for() -> str:
            return (
                f"the trainer wanted {n} experiences of buffer '{self.name}', which has "
                f"{len(self)}, and no new one came for {self._timeout:g} s (max_read_timeout)"
            )

        found = await self._poll(lambda connection: self._try_take(connection, n), waited_for)
        self._bell.ring()
        if not found:
            raise Closed(f"buffer '{self.name}' is closed and empty")
        self._taken += [row_id for row_id, _ in found]
        return await asyncio.to_thread(lambda: [decode(data)[0] for _, data in found])

    async def take_step(self) -> list[Experience]:
        """Not here: the Plan refuses it."""
        raise NotImplementedError("an SQL buffer does not keep explore steps apart")

    async def close(self) -> None:
        """See Buffer."""
        await asyncio.to_thread(self._leave, None)
        self._bell.ring()

    async def fail(self, error: BaseException) -> None:
        """This side has failed: whoever puts or takes, in whatever process, stops with its text."""
        self._failure = error
        await asyncio.to_thread(self._leave, f"{type(error).__name__}: {error}")
        self._bell.ring()

    def __len__(self) -> int:
        with self._database.connect().execution_options(reads_only=True) as connection:
            return self._count_open(connection)

    def commit(self) -> None:
        """See Buffer."""
        with self._database.begin() as connection:
            self._consume(connection, self._taken)
        self._taken = []

    def state(self) -> dict[str, Any]:
        """What was taken since the last commit: it belongs to the checkpoint being made."""
        return {"taken": list(self._taken)}

    def load_state(self, state: dict[str, Any]) -> None:
        """See Buffer."""
        with self._database.begin() as connection:
            self._consume(connection, state["taken"])
            self._release(connection)
        self._taken = []

    def dispose(self) -> None:
        """Let go of the database's connections."""
        self._database.dispose()

    def _leave(self, failure: str | None) -> None:
        with self._database.begin() as connection:
            self._parties.leave(connection, failure)

    async def _poll(
        self, attempt: Callable[[Connection], Result | None], waited_for: Callable[[], str]
    ) -> Result:
        """`attempt` in transactions of its own until it gives something; ever less often."""
        seen = -1
        since = self._clock.now()
        pause = POLL_FIRST

        def look() -> tuple[Result | None, int]:
            with self._database.begin() as connection:
                result = attempt(connection)
                return result, self._changes(connection) if result is None else 0

        while True:
            result, changes = await asyncio.to_thread(look)
            if result is not None:
                return result
            if changes != seen:
                seen, since, pause = changes, self._clock.now(), POLL_FIRST
            left = since + self._timeout - self._clock.now()
            if left <= 0:
                raise TimeoutError(waited_for())
            await self._bell.wait(min(pause, left))
            pause = min(2 * pause, POLL_LONGEST)

    def _try_put(
        self, connection: Connection, rows: list[dict[str, Any]], groups: list[str]
    ) -> bool | None:
        """True when the rows are in; None while the buffer is full."""
        self._stop_if_failed(connection)
        if self._parties.ended(connection, "train") or self._parties.left(connection, "explore"):
            raise Closed(f"buffer '{self.name}' is closed")
        table = self._rows
        steps = select(func.count(func.distinct(table.c.batch))).where(*self._open())
        full = (connection.scalar(steps) or 0) >= self._capacity
        if full and self._parties.wanted(connection) <= self._count_open(connection):
            return None
        there: set[str] = set()
        for start in range(0, len(groups), CHUNK):
            part = groups[start : start + CHUNK]
            known = select(table.c.task_id).where(table.c.task_id.in_(part)).distinct()
            there.update(connection.scalars(known))
        if there:
            logger.info("%d groups were in buffer '%s' already", len(there), self.name)
        new = [row for row in rows if row["task_id"] not in there]
        if new:
            connection.execute(insert(table), new)
        return True

    def _try_take(self, connection: Connection, n: int) -> list[tuple[int, bytes]] | None:
        """The rows, claimed; an empty list at the end; None while there are too few."""
        self._stop_if_failed(connection)
        table = self._rows
        ended = self._parties.ended(connection, "explore")
        ended = ended or self._parties.left(connection, "train")
        has = self._count_open(connection)
        self._parties.want(connection, n if has < n and not ended else 0)
        if has < n and not ended:
            return None
        oldest = (
            select(table.c.id, table.c.experience_bytes)
            .where(*self._open())
            .order_by(table.c.id)
            .limit(n)
            .with_for_update(skip_locked=True)
        )
        found = [(row.id, row.experience_bytes) for row in connection.execute(oldest)]
        self._update(connection, [i for i, _ in found], claimed_by=self._parties.name)
        return found

    def _open(self) -> tuple[Any, Any]:
        """Rows that can be taken."""
        return self._rows.c.consumed == 0, self._rows.c.claimed_by.is_(None)

    def _count_open(self, connection: Connection) -> int:
        return connection.scalar(select(func.count()).where(*self._open())) or 0

    def _changes(self, connection: Connection) -> int:
        """A number that changes when anything is put or taken."""
        table = self._rows
        newest = connection.scalar(select(func.max(table.c.id))) or 0
        return 2 * newest - self._count_open(connection)

    def _consume(self, connection: Connection, ids: Sequence[int]) -> None:
        self._update(connection, ids, consumed=1, claimed_by=None)

    def _release(self, connection: Connection) -> None:
        mine = self._rows.c.claimed_by == self._parties.name
        connection.execute(update(self._rows).where(mine).values(claimed_by=None))

    def _update(self, connection: Connection, ids: Sequence[int], **values: Any) -> None:
        for start in range(0, len(ids), CHUNK):
            part = self._rows.c.id.in_(ids[start : start + CHUNK])
            connection.execute(update(self._rows).where(part).values(**values))

    def _stop_if_failed(self, connection: Connection) -> None:
        failed = self._parties.failure(connection)
        if failed is not None:
            raise RuntimeError(
                f"buffer '{self.name}': the other side has failed: {failed}"
            ) from self._failure

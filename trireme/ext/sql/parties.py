"""Parties: records the writers and readers of an SQL buffer: which are alive, and their last state.

A party is a name in a role, `explore` or `train`. All methods run inside the caller's transaction.

- A name belongs to the process that entered with it last; the one before notices (`mine`).
- A thread sends regular heartbeats (`beat`); a party without one for `lease` seconds is `silent`,
  and others may take its rows.
- A party is reported as `missing`, and what it waits for no longer counts, only after this process
  has watched it in vain: with SQLite each machine has its own clock, which may be set.
- A writer ignores the end of readers, and failures, from before it entered: those of an earlier
  attempt, whose parties may enter again after it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from trireme.buffer.buffer import Clock
from trireme.buffer.table import database_time, one_at_a_time
from trireme.log import get_logger
from trireme.text import storable

logger = get_logger("queue_experience_buffer")


class PartyHeartbeat:
    """Calls `beat` every `interval` seconds until `stop`; ends with the process.

    A failed beat is logged and retried: a party that then counts as silent gets an error when it
    commits.
    """

    def __init__(self, beat: Callable[[], None], interval: float) -> None:
        self._beat = beat
        self._interval = interval
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Send no more beats."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self._beat()
            except SQLAlchemyError as error:
                said = str(error).partition("\n")[0]
                logger.warning(
                    "a heartbeat could not be written to the buffer's database: %s", said
                )


class Parties:
    """A table with one row a party; this object speaks for `name` in `roles`."""

    def __init__(
        self,
        table_name: str,
        metadata: MetaData,
        *,
        name: str,
        roles: Sequence[str],
        lease: float,
        clock: Clock,
    ) -> None:
        """`clock` is this process's own, by which it watches the others' heartbeats."""
        self.name = name
        self.roles = tuple(roles)
        self.lease = lease
        self._clock = clock
        self._watched: dict[str, dict[tuple[str, float], float]] = {}
        """By role: each party's process and last heartbeat, and when this process first saw it."""
        self._process = secrets.token_hex(8)
        self._ended_before: list[str] = []
        """The processes whose end or failure does not concern this one."""
        self._table = Table(
            table_name,
            metadata,
            Column("name", String, primary_key=True),
            Column("role", String, primary_key=True),
            Column("process", String, nullable=False),  # which one the name belongs to
            Column("seen", Float, nullable=False),  # by the database's clock
            Column("closed", Boolean, nullable=False),
            Column("failure", Text),
            Column("wanted", Integer, nullable=False),  # it waits for this many experiences
        )

    def enter(self, connection: Connection) -> bool:
        """Enter as a party again: not closed, not failed. Returns whether a process of this name
        has been one before.

        Earlier failures do not concern it, nor does the end of a reader; to a reader the end of a
        writer still does.
        """
        one_at_a_time(connection, self._table.name)
        now = database_time(connection)
        last = select(self._table.c.process).where(*self._row(self.roles[0]))
        again = connection.scalar(last) not in (None, self._process)
        for role in self.roles:
            connection.execute(delete(self._table).where(*self._row(role)))
            row = {"name": self.name, "role": role, "process": self._process, "seen": now}
            connection.execute(insert(self._table).values(**row, closed=False, wanted=0))
        if "train" in self.roles:
            failed = self._table.c.failure.is_not(None)
            connection.execute(update(self._table).where(failed).values(failure=None))
            return again
        table = self._table
        ended = table.c.failure.is_not(None) | ((table.c.role == "train") & table.c.closed)
        self._ended_before = list(connection.scalars(select(table.c.process).where(ended)))
        return again

    def beat(self, connection: Connection) -> None:
        """Send a heartbeat."""
        now = database_time(connection)
        for role in self.roles:
            connection.execute(update(self._table).where(*self._me(role)).values(seen=now))

    def mine(self, connection: Connection) -> bool:
        """Return whether the name is still this process's."""
        row = select(self._table.c.process).where(*self._row(self.roles[0]))
        return connection.scalar(row) == self._process

    def silent(self, connection: Connection, role: str) -> dict[str, float]:
        """Return other parties of that side without a heartbeat, with the seconds since.

        Closed ones are included: rows that they still claim are never trained.
        """
        now, table = database_time(connection), self._table
        rows = select(table.c.name, table.c.seen).where(
            table.c.role == role, table.c.seen < now - self.lease, table.c.name != self.name
        )
        return {row.name: now - row.seen for row in connection.execute(rows)}

    def missing(self, connection: Connection, role: str) -> str:
        """Return the end of an error sentence: that no party of that side has connected, or which
        ones stopped sending heartbeats; or nothing.
        """
        gone, table = self.gone(connection, role), self._table
        if connection.scalar(self._of_now(table.c.name).where(table.c.role == role)) is None:
            return f"; no command with mode: {role} uses this buffer"
        names = ", ".join(f"{name} for {seconds:.0f} s" for name, seconds in gone.items())
        return f"; no heartbeat from: {names}" if names else ""

    def gone(self, connection: Connection, role: str) -> dict[str, float]:
        """Return the parties of that side that went without a word, and for how many seconds they
        have been silent. It watches them from one call to the next.

        Half a lease without a heartbeat is enough if the last one is older than a lease by the
        database's clock.
        """
        now, here, table = database_time(connection), self._clock.now(), self._table
        rows = select(table.c.name, table.c.process, table.c.seen)
        rows = rows.where(table.c.role == role, table.c.closed.is_(False))
        parties = connection.execute(rows).all()
        before = self._watched.get(role, {})
        self._watched[role] = since = {
            (row.process, row.seen): before.get((row.process, row.seen), here) for row in parties
        }
        gone: dict[str, float] = {}
        for row in parties:
            watched, age = here - since[row.process, row.seen], now - row.seen
            if watched > (self.lease if age < self.lease else self.lease / 2):
                gone[row.name] = max(watched, age)
        return gone

    def leave(self, connection: Connection, failure: str | None = None) -> None:
        """Record that this party has ended, with the cause of a failure."""
        said: dict[str, Any] = {"closed": True}
        if failure is not None:
            said["failure"] = storable(failure)
        for role in self.roles:
            connection.execute(update(self._table).where(*self._me(role)).values(**said))

    def failure(self, connection: Connection) -> str | None:
        """Return the error text of any member that failed; None if none did."""
        failure = self._table.c.failure
        return connection.scalar(self._of_now(failure).where(failure.is_not(None)).limit(1))

    def ended(self, connection: Connection, role: str) -> bool:
        """Return whether the role had members and all of them have closed."""
        flags = self._of_now(self._table.c.closed).where(self._table.c.role == role)
        closed = list(connection.scalars(flags))
        return bool(closed) and all(closed)

    def left(self, connection: Connection, role: str) -> bool:
        """Return whether this process has closed."""
        return bool(connection.scalar(select(self._table.c.closed).where(*self._me(role))))

    def want(self, connection: Connection, number: int) -> None:
        """Let writers know how many experiences we wait for; 0: none."""
        mine = update(self._table).where(*self._me("train"), self._table.c.wanted != number)
        connection.execute(mine.values(wanted=number))

    def wanted(self, connection: Connection) -> int:
        """Return the largest number that a reader waits for, of those that are there."""
        table, gone = self._table, self.gone(connection, "train")
        most = select(func.max(table.c.wanted)).where(table.c.name.not_in(list(gone)))
        return connection.scalar(most.where(table.c.closed.is_(False))) or 0

    def _of_now(self, column: Column[Any]) -> Select[Any]:
        """Select a column of all parties but those that had ended before this one entered."""
        return select(column).where(self._table.c.process.not_in(self._ended_before))

    def _row(self, role: str) -> tuple[Any, ...]:
        return self._table.c.name == self.name, self._table.c.role == role

    def _me(self, role: str) -> tuple[Any, ...]:
        return (*self._row(role), self._table.c.process == self._process)

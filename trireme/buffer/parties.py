"""Parties: who puts into and takes from an SQL buffer, and what each has said last.

A party is a name in a role, `explore` or `train`. All methods run inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
    update,
)


class Parties:
    """A table with one row a party; this object speaks for `name` in `roles`."""

    def __init__(
        self, table_name: str, metadata: MetaData, *, name: str, roles: Sequence[str]
    ) -> None:
        self.name = name
        self.roles = tuple(roles)
        self._table = Table(
            table_name,
            metadata,
            Column("name", String, primary_key=True),
            Column("role", String, primary_key=True),
            Column("closed", Boolean, nullable=False),
            Column("failure", Text),
            Column("wanted", Integer, nullable=False),  # it waits for so many experiences
        )

    def enter(self, connection: Connection) -> None:
        """Take part anew: not closed, not failed.

        For a reader what failed before it came is no news; that a writer has ended still is.
        """
        for role in self.roles:
            connection.execute(delete(self._table).where(*self._me(role)))
            row = {"name": self.name, "role": role, "closed": False, "wanted": 0}
            connection.execute(insert(self._table).values(**row))
        if "train" in self.roles:
            connection.execute(update(self._table).values(failure=None))

    def leave(self, connection: Connection, failure: str | None = None) -> None:
        """Say that we have ended, and why, where it was a failure."""
        said: dict[str, Any] = {"closed": True}
        if failure is not None:
            said["failure"] = failure
        for role in self.roles:
            connection.execute(update(self._table).where(*self._me(role)).values(**said))

    def failure(self, connection: Connection) -> str | None:
        """What some party failed of."""
        failures = select(self._table.c.failure).where(self._table.c.failure.is_not(None))
        return connection.scalar(failures.limit(1))

    def ended(self, connection: Connection, role: str) -> bool:
        """Whether that side has been here and every party of it has closed."""
        flags = select(self._table.c.closed).where(self._table.c.role == role)
        closed = list(connection.scalars(flags))
        return bool(closed) and all(closed)

    def left(self, connection: Connection, role: str) -> bool:
        """Whether we have closed."""
        return bool(connection.scalar(select(self._table.c.closed).where(*self._me(role))))

    def want(self, connection: Connection, number: int) -> None:
        """Let writers know how many experiences we wait for; 0: none."""
        mine = update(self._table).where(*self._me("train"))
        connection.execute(mine.values(wanted=number))

    def wanted(self, connection: Connection) -> int:
        """The most that a reader waits for."""
        return connection.scalar(select(func.max(self._table.c.wanted))) or 0

    def _me(self, role: str) -> tuple[Any, Any]:
        return self._table.c.name == self.name, self._table.c.role == role

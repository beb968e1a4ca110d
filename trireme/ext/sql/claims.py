"""Claims: decides which rows of an experience table a trainer takes, and records who took them.

A row is open, or claimed by a reader, or claimed and sealed by that reader's checkpoint; a
checkpoint's commit makes its use final. All methods run inside the caller's transaction.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    MetaData,
    Table,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from trireme.buffer.table import database_time, experience_table
from trireme.experience import Experience

NEVER = 1e18
"""The time of the next use of a row that is too old for its trainer: later than any clock."""
CHUNK = 500
"""Ids in one statement: databases limit the number of parameters."""
_AND = "\n"
"""Between the seals of a row's uses, the first of them first."""


@dataclass(frozen=True)
class Reuse:
    """Priority replay in a database: version - decay * uses, the highest first.

    Differs from the queue's in one point: the noise is drawn once for each group, by its id.
    """

    decay: float = 2.0
    use_count_limit: int = 0
    """0: any number."""
    sigma: float = 0.0
    cooldown: float | None = None
    """Seconds until a row may be used again; None: never."""

    @property
    def limit(self) -> int:
        """Uses of a row; 0: any number."""
        return 1 if self.cooldown is None else max(self.use_count_limit, 0)


class Claims:
    """The rows of one buffer; this object takes for `reader`."""

    def __init__(
        self, name: str, metadata: MetaData, *, reader: str, reuse: Reuse | None = None
    ) -> None:
        """Without `reuse` rows are taken once, in the order in which they were put."""
        self.table: Table = experience_table(name, metadata)
        self._reader = reader
        self._reuse = reuse

    def add(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> set[str]:
        """Put whole groups in; returns those that were there already, and are not put again."""
        table = self.table
        there: set[str] = set()
        for part in _chunks(list(dict.fromkeys(row["task_id"] for row in rows))):
            known = select(table.c.task_id).where(table.c.task_id.in_(part)).distinct()
            there.update(connection.scalars(known))
        new = [dict(row) for row in rows if row["task_id"] not in there]
        self._set_priorities(new)
        if new:
            connection.execute(insert(table), new)
        return there

    def used_up(self, connection: Connection, groups: Iterable[str]) -> int:
        """Count those of the groups of which no row will be taken again."""
        table = self.table
        left: set[str] = set()
        wanted = set(groups)
        to_come = and_(table.c.consumed >= 0, self._not_used_up())
        for part in _chunks(sorted(wanted)):
            some = select(table.c.task_id).where(table.c.task_id.in_(part), to_come)
            left.update(connection.scalars(some.distinct()))
        return len(wanted - left)

    def drop_lowest(self, connection: Connection, capacity: int) -> int:
        """Drop the open groups of the lowest priority beyond `capacity`; how many. Those that are
        used up take no room.
        """
        table = self.table
        group = (
            select(table.c.task_id)
            .where(table.c.consumed >= 0, table.c.claimed_by.is_(None), self._not_used_up())
            .group_by(table.c.task_id)
            .order_by(func.max(self._priority()).desc(), func.min(table.c.id).desc())
        )
        lowest = list(connection.scalars(group.offset(capacity)))
        dropped = {"consumed": -1, "dropped_at": self.newest(connection)}
        for part in _chunks(lowest):
            rows = and_(table.c.task_id.in_(part), table.c.claimed_by.is_(None))
            connection.execute(update(table).where(rows, table.c.consumed >= 0).values(**dropped))
        return len(lowest)

    def undrop(self, connection: Connection, newest: int) -> None:
        """Open the rows again that had no room since that row was put, with their uses."""
        table = self.table
        alike: dict[int, list[int]] = {}
        rows = select(table.c.id, table.c.consumed_by).where(table.c.dropped_at > newest)
        for row, by in connection.execute(rows):
            alike.setdefault(len(by.split(_AND)) if by else 0, []).append(row)
        for uses, ids in alike.items():
            for part in _chunks(ids):
                chosen = update(table).where(table.c.id.in_(part))
                connection.execute(chosen.values(consumed=uses, dropped_at=None))

    def _drop(self, connection: Connection, ids: Sequence[int]) -> None:
        """Never return those rows again; earlier readers may still have claimed them."""
        for part in _chunks(ids):
            rows = self.table.c.id.in_(part)
            connection.execute(update(self.table).where(rows).values(consumed=-1, used=0))

    def claim(
        self,
        connection: Connection,
        n: int,
        read: Callable[[int, bytes], Experience | None],
        is_older: Callable[[int, Experience], bool],
        *,
        least: int,
        ended: bool,
    ) -> list[tuple[int, int, Experience]]:
        """Claim at most n open rows that no other reader is just taking; returns id, use, and the
        result of `read` on the bytes. Rows for which `read` returns None are dropped. Those that
        `is_older` are claimed for good, and are none of the n.

        Returns none if there are fewer than `least`.
        """
        table = self.table
        order = [table.c.id] if self._reuse is None else [self._priority().desc(), table.c.id]
        columns = (table.c.id, table.c.consumed + table.c.used + 1, table.c.experience_bytes)
        rows = select(*columns).where(self._open(connection, ended=ended)).order_by(*order)
        while True:
            locked = connection.execute(rows.limit(n).with_for_update(skip_locked=True)).all()
            made = [(row[0], row[1], read(row[0], row[2])) for row in locked]
            self._drop(connection, [row for row, _, e in made if e is None])
            whole = [(row, use, e) for row, use, e in made if e is not None]
            older = {row for row, _, e in whole if is_older(row, e)}
            self._mark(connection, sorted(older), ready_at=NEVER)
            taken = [(row, use, e) for row, use, e in whole if row not in older]
            if len(taken) == len(made):
                break
        if len(taken) < least:
            return []
        rests: dict[str, Any] = {}
        if self._reuse is not None and self._reuse.cooldown is not None:
            rests["ready_at"] = database_time(connection) + self._reuse.cooldown
        self._mark(connection, [row for row, _, _ in taken], **rests)
        return taken

    def _mark(self, connection: Connection, ids: Sequence[int], **rests: Any) -> None:
        """Mark rows as taken by this reader; `rests` says when they may be used again."""
        taken = {"claimed_by": self._reader, "used": self.table.c.used + 1, **rests}
        for part in _chunks(ids):
            rows = self.table.c.id.in_(part)
            connection.execute(update(self.table).where(rows).values(**taken))

    def seal(self, connection: Connection, seal: str) -> int:
        """Bind this reader's rows to the checkpoint `seal`; returns their number."""
        table = self.table
        held = and_(table.c.claimed_by == self._reader, table.c.sealed.is_(None))
        connection.execute(update(table).where(held).values(sealed=seal))
        return self._count(connection, table.c.sealed == seal)

    def consume(self, connection: Connection, seal: str) -> None:
        """Make the use of that checkpoint's rows final."""
        table = self.table
        sealed, by = table.c.sealed == seal, table.c.consumed_by
        final = {"claimed_by": None, "sealed": None, "used": 0}
        for used in list(connection.scalars(select(table.c.used).where(sealed).distinct())):
            uses: dict[str, Any] = {"consumed": table.c.consumed + used}
            if used:  # otherwise the row has been dropped since
                uses["consumed_by"] = func.coalesce(by + _AND, "") + _AND.join([seal] * used)
            chosen = and_(sealed, table.c.used == used)
            connection.execute(update(table).where(chosen).values(**uses, **final))

    def seals(self, connection: Connection) -> list[str]:
        """Return the checkpoints that have made uses of rows final."""
        by = self.table.c.consumed_by
        rows = connection.scalars(select(by).where(by.is_not(None)).distinct())
        return list(dict.fromkeys(seal for row in rows for seal in row.split(_AND)))

    def restore(self, connection: Connection, seals: Sequence[str]) -> int:
        """Open the rows of those checkpoints again, without the uses in them; returns their
        number.
        """
        if not seals:
            return 0
        table, gone = self.table, set(seals)
        rows = select(table.c.id, table.c.consumed_by)
        rows = rows.where(table.c.consumed_by.is_not(None), table.c.consumed > 0)
        alike: dict[tuple[str | None, int], list[int]] = {}
        for row, by in connection.execute(rows):
            uses = by.split(_AND)
            left = [seal for seal in uses if seal not in gone]
            if len(left) < len(uses):
                change = _AND.join(left) or None, len(uses) - len(left)
                alike.setdefault(change, []).append(row)
        for (by, fewer), ids in alike.items():
            undone = {"consumed": table.c.consumed - fewer, "consumed_by": by}
            for part in _chunks(ids):
                chosen = table.c.id.in_(part)
                connection.execute(update(table).where(chosen).values(**_FREE, **undone))
        return sum(map(len, alike.values()))

    def release(
        self, connection: Connection, *, but: Iterable[int] = (), seal: str | None = None
    ) -> None:
        """Release this reader's rows, except those in `but` and those that the checkpoint `seal`
        sealed.
        """
        table = self.table
        mine = select(table.c.id).where(table.c.claimed_by == self._reader)
        if seal is not None:
            mine = mine.where(or_(table.c.sealed.is_(None), table.c.sealed != seal))
        kept = set(but)
        for part in _chunks([i for i in connection.scalars(mine) if i not in kept]):
            connection.execute(update(table).where(table.c.id.in_(part)).values(**_FREE))

    def newest(self, connection: Connection) -> int:
        """Return the id of the row that was put last; 0 if there is none."""
        return connection.scalar(select(func.max(self.table.c.id))) or 0

    def rewind(self, connection: Connection, newest: int) -> int:
        """Remove the rows that the explorer of a whole run put after that row: it makes them again.
        Returns their number.

        Rows of other explorers have their names in the source, and stay; so do used rows.
        """
        table = self.table
        unused = and_(table.c.consumed <= 0, table.c.claimed_by.is_(None))
        this_explorer = and_(table.c.id > newest, ~table.c.source.contains("/"))
        return connection.execute(delete(table).where(this_explorer, unused)).rowcount

    def release_of(self, connection: Connection, readers: Iterable[str]) -> int:
        """Release those readers' rows that no checkpoint of theirs may contain; returns their
        number.
        """
        table = self.table
        held = and_(
            table.c.consumed >= 0, table.c.claimed_by.in_(list(readers)), table.c.sealed.is_(None)
        )
        return connection.execute(update(table).where(held).values(**_FREE)).rowcount

    def count(self, connection: Connection, *, ended: bool = False, most: int = 0) -> int:
        """Count the rows that can be taken now; up to `most`, if given."""
        return self._count(connection, self._open(connection, ended=ended), most)

    def steps(self, connection: Connection) -> int:
        """Count the explore steps with rows that no trainer has taken."""
        table = self.table
        untaken = and_(table.c.consumed == 0, table.c.claimed_by.is_(None))
        return connection.scalar(select(func.count(table.c.source.distinct())).where(untaken)) or 0

    def changes(self, connection: Connection) -> int:
        """Return a number that changes when anything is put or taken."""
        return 2 * self.newest(connection) - self.count(connection)

    def _count(self, connection: Connection, chosen: ColumnElement[bool], most: int = 0) -> int:
        rows = select(self.table.c.id).where(chosen)
        rows = rows.limit(most) if most else rows
        return connection.scalar(select(func.count()).select_from(rows.subquery())) or 0

    def _open(self, connection: Connection, *, ended: bool) -> ColumnElement[bool]:
        """Select rows that can be taken; once no new ones will be put, only unused ones."""
        table = self.table
        fresh = and_(table.c.consumed == 0, table.c.claimed_by.is_(None))
        if self._reuse is None or self._reuse.limit == 1 or ended:
            return fresh
        again = and_(
            table.c.consumed >= 0,
            or_(table.c.claimed_by.is_(None), table.c.claimed_by == self._reader),
            table.c.sealed.is_(None),
            table.c.ready_at <= database_time(connection),
        )
        return or_(fresh, and_(again, self._not_used_up()))

    def _not_used_up(self) -> ColumnElement[bool]:
        young = self.table.c.ready_at < NEVER
        consumed, limit = self.table.c.consumed, 1 if self._reuse is None else self._reuse.limit
        if not limit:
            return young
        # the first condition alone is one that an index bounds
        return and_(young, consumed < limit, consumed + self.table.c.used < limit)

    def _priority(self) -> ColumnElement[float]:
        decay = self._reuse.decay if self._reuse else 0.0
        return self.table.c.priority - decay * (self.table.c.consumed + self.table.c.used)

    def _set_priorities(self, rows: Sequence[dict[str, Any]]) -> None:
        """Set the priorities: a group's is its oldest sampled version; rows without sampled tokens
        count as 0.
        """
        oldest: dict[str, float] = {}
        for row in rows:
            version, group = row["model_version"], row["task_id"]
            if version >= 0:
                oldest[group] = min(version, oldest.get(group, version))
        sigma = self._reuse.sigma if self._reuse else 0.0
        for row in rows:
            group = row["task_id"]
            noise = random.Random(group).gauss(0.0, sigma) if sigma else 0.0
            row["priority"] = oldest.get(group, 0.0) + noise


_FREE: dict[str, Any] = {"claimed_by": None, "used": 0, "sealed": None, "ready_at": 0.0}


def _chunks(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]

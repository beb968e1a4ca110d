"""SqlBuffer: carries experiences through a database, between any number of processes.

Invariants:
- A put is one transaction of whole groups; a group that exists already is not put again, so that an
  explorer may repeat a step after a crash.
- A take claims its rows in one transaction, so that several readers never share one. `state` seals
  the claimed rows for the checkpoint being made, and `commit` makes their use final; `load_state`
  makes final the rows that its checkpoint sealed and releases this reader's other claims.
- `load_state` of a whole run (role `both`) also removes the rows that its explorer has put since,
  and opens those that had no room since: it rewinds to that step and makes them again. A whole run
  without a checkpoint removes all unused ones of its earlier attempts at its first put or take.
- A reader without a heartbeat for `lease_time` seconds loses its unsealed rows to the others; if it
  returns, it gets an error instead of learning twice.
- The table of parties records which ones have closed or failed, where the other process sees it.
  Opening a buffer as a party resets the record of that party's last process.
- A row is read before it is claimed: one whose bytes are damaged ends the take, which has claimed
  nothing then; with `on_error` skip it is dropped for good, counted, and another takes its place.
- Rows that are older than a take accepts are claimed with it, and no replay returns them again.
- A server that goes away is waited for, as long as for an experience (`max_read_timeout`);
  reporting a failure, and releasing the claims of a cancelled take, do not wait.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection, Engine, MetaData
from sqlalchemy.exc import DBAPIError, OperationalError

from trireme.buffer.buffer import (
    DEFAULTS,
    Clock,
    Closed,
    Condition,
    Demand,
    WallClock,
    of_versions,
)
from trireme.buffer.table import first_line, is_away, open_database, persist, row_of
from trireme.config.schema_rollout import ExperienceBufferConfig
from trireme.experience import Experience
from trireme.ext.sql.claims import Claims, Reuse
from trireme.ext.sql.parties import Parties, PartyHeartbeat
from trireme.ext.sql.pictures import PictureTable
from trireme.log import get_logger
from trireme.pictures import Picture
from trireme.serialize import Damaged, Stored, decode, encode_each

logger = get_logger("queue_experience_buffer")

OnError = Literal["fail", "skip"]
Role = Literal["explore", "train", "both"]
Result = TypeVar("Result")

POLL_FIRST, POLL_LONGEST = 0.05, 1.0
"""Seconds between two polls of the database; each one without news doubles them."""
NOTED = 15.0
"""Seconds of waiting for a missing side after which a warning reports it."""
BEATS = 4
"""Heartbeats in the time of a lease."""


class SqlBuffer:
    """A table of experiences and a table of its users."""

    def __init__(
        self,
        name: str,
        url: str,
        section: ExperienceBufferConfig = DEFAULTS,
        *,
        role: Role = "both",
        party: str | None = None,
        reuse: Reuse | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`role` is what this process does with the buffer, `party` its name among several.

        The section's `capacity` counts explore steps that are not taken yet; with `reuse`, groups,
        beyond which the lowest priority is dropped. Raises ValueError if the database cannot be
        opened.
        """
        self.name = name
        self._capacity = section.capacity
        self._timeout = section.max_read_timeout
        self._lease = section.lease_time
        self._reuse = reuse
        self._on_error = section.on_error
        self._role = role
        self._retry_seconds = section.max_retry_interval
        self._clock = clock or WallClock()
        self._changed = Condition(self._clock)
        self._noted = False
        self._began = False
        """Whether anything has been put."""
        self._continued = False
        """Whether it goes on from a checkpoint."""
        self.demand = Demand()
        metadata = MetaData()
        party = party or "default"
        roles = ("explore", "train") if role == "both" else (role,)
        self._claims = Claims(name, metadata, reader=party, reuse=reuse)
        self._pictures = PictureTable(name, metadata)
        self._parties = Parties(
            f"{name}_parties",
            metadata,
            name=party,
            roles=roles,
            lease=self._lease,
            clock=self._clock,
        )
        self._database = open_database(
            url, metadata, retries=section.max_retry_times, retry_seconds=self._retry_seconds
        )
        self._where = f"'{self._database.url.render_as_string()}'"
        self._failure: BaseException | None = None
        self._held: set[int] = set()
        """Rows taken and not yet sealed."""
        self._last_seal: int | None = None
        """The number of the last one, once it is known; a seal is <reader>/<number>/<token>."""
        self._seal: str | None = None
        self._sealed = 0
        """The checkpoint that is being made, and how many rows belong to it."""
        self._taking = threading.Lock()
        self._gives_up = threading.Event()
        """Set when a take is cancelled."""
        self._away = False
        self._knows_claims = False
        """Whether this reader's claims in the database are exactly `_held` and the sealed rows."""
        self._older: dict[int, Experience] = {}
        """Rows that the take met and that are too old for it."""
        self._dropped = 0
        self._damaged: set[int] = set()
        """Rows that were left out."""
        again = self._transact(self._parties.enter)
        self._begins_anew = again and role == "both"
        """Whether an earlier attempt's rows may be there, and no checkpoint says which stay."""
        self._heartbeat = PartyHeartbeat(_beat(self._database, self._parties), self._lease / BEATS)
        weakref.finalize(self, self._heartbeat.stop)

    async def put(self, experiences: Sequence[Experience]) -> None:
        """Add whole groups. Raises TimeoutError if nothing is taken for
        `max_read_timeout` seconds.
        """

        def full() -> str:
            return (
                f"buffer '{self.name}' is full ({self._capacity} explore steps) and the trainer "
                f"took nothing for {self._timeout:g} s (max_read_timeout){self._missing('train')}"
            )

        self._remove_earlier()
        rows = await asyncio.to_thread(_rows_of, experiences)
        known = self._pictures.known
        pictures = known.lacking(picture for e in experiences for picture in e.pictures)

        def attempt(connection: Connection) -> bool | None:
            return self._try_put(connection, rows, pictures)

        await self._poll(attempt, full, "train")
        known.add(pictures)  # now that its transaction has ended
        logger.info("%d experiences put", len(rows))
        self.demand.set(False)  # until a look that begins now has found too few
        self._changed.notify_all()

    async def take(self, n: int, *, oldest: float = 0) -> list[Experience]:
        """Wait for `n` experiences and claim them. If cancelled, it has claimed none."""
        self._remove_earlier()
        self._older = {}
        self._gives_up.clear()

        def transact(attempt: Callable[[Connection], Result], gives_up: threading.Event) -> Result:
            with self._taking:
                return self._transact(attempt, gives_up)

        def waited_for() -> str:
            return (
                f"the trainer requested {n} experiences{of_versions(oldest)} of buffer "
                f"'{self.name}', which has {len(self)}, and no new one came for "
                f"{self._timeout:g} s (max_read_timeout){self._missing('explore')}"
            )

        before = set(self._held)
        try:
            taken = await self._poll(
                lambda connection: self._try_take(connection, n, oldest),
                waited_for,
                "explore",
                in_vain=lambda: self.demand.set(True),
                transact=transact,
                gives_up=self._gives_up,
            )
            self._changed.notify_all()
            if not (taken or self._older):
                raise Closed(f"buffer '{self.name}' is closed and empty")
            self._held.update(self._older, (row_id for row_id, _, _ in taken))
            logger.info("%d experiences taken", len(taken))
            return [*(experience for _, _, experience in taken), *self._older.values()]
        except asyncio.CancelledError:
            with self._taking:  # its thread may be about to claim
                self._held = before
                self._at_once(partial(self._end_take, before, self._seal))
            raise
        finally:
            self.demand.set(False)

    async def take_step(self) -> list[Experience]:
        """Raise an error: the Plan refuses this combination."""
        raise NotImplementedError("an SQL buffer does not distinguish explore steps")

    async def close(self) -> None:
        """Announce that this side puts and takes no more."""
        await asyncio.to_thread(self._transact, self._parties.leave)
        self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Announce that this side failed: every put and take, in any process, stops
        with its text.
        """
        self._failure = error
        text = f"{type(error).__name__}: {error}"
        await asyncio.to_thread(self._at_once, lambda c: self._parties.leave(c, text))
        self._changed.notify_all()

    async def starves(self) -> bool:
        """Return whether a reader, in any process, waits for more than there is."""
        return await asyncio.to_thread(self._transact, self._starves)

    async def without_reader(self) -> str:
        """Return which readers send no heartbeat, watched from one call to the next; empty if all
        do.
        """
        return await asyncio.to_thread(self._missing, "train")

    def __len__(self) -> int:
        with self._database.connect().execution_options(reads_only=True) as connection:
            return self._claims.count(connection)

    def commit(self) -> None:
        """Consume the experiences that the last `state` sealed, or without one all that
        were taken.
        """
        if self._seal is None:
            self.state()
        seal = self._seal or ""
        self._transact(lambda connection: self._claims.consume(connection, seal))
        self._seal, self._sealed = None, 0  # now: a take meanwhile gives back what has no seal

    def state(self) -> dict[str, Any]:
        """Seal the rows taken since the last commit: they belong to the checkpoint being made.

        Raises RuntimeError if some of them, or our name, have passed to another reader.
        """
        seal = self._seal or self._next_seal()
        wanted = self._sealed + len(self._held)

        def attempt(connection: Connection) -> tuple[int, int]:
            self._stop_if_replaced(connection)  # claims of that process are in our name
            gone = wanted - self._claims.seal(connection, seal)
            if gone > 0:  # the error undoes the transaction
                raise RuntimeError(
                    f"buffer '{self.name}': reader '{self._parties.name}' sent no heartbeat for "
                    f"{self._lease:g} s (lease_time), and {gone} of the {wanted} experiences "
                    "that it had taken went to others: restart it from its last checkpoint"
                )
            return self._claims.newest(connection), self._claims.count(connection, ended=True)

        newest, waiting = self._transact(attempt)
        self._seal, self._sealed = seal, wanted
        self._held.clear()
        return {"seal": seal, "newest": newest, "waiting": waiting}

    def load_state(self, state: dict[str, Any]) -> None:
        """Return to a checkpoint: experiences that were taken after it are open again."""
        number = self._number_of(state["seal"])

        def attempt(connection: Connection) -> None:
            rewinds = self._role == "both" and "newest" in state
            self._claims.consume(connection, state["seal"])
            self._claims.release(connection)
            if rewinds:
                self._claims.undrop(connection, state["newest"])
            later = [s for s in self._claims.seals(connection) if self._number_of(s) > number]
            if back := self._claims.restore(connection, later):
                logger.warning("%d experiences of later checkpoints are available again", back)
            if rewinds:
                self._claims.rewind(connection, state["newest"])

        self._transact(attempt)
        self._held.clear()
        self._seal, self._sealed, self._last_seal = None, 0, number
        self._knows_claims = True
        self._begins_anew, self._continued = False, True

    def metrics(self) -> dict[str, float]:
        """Groups that had no room, and rows that were damaged, so far."""
        metrics = {"buffer/damaged": float(len(self._damaged))} if self._damaged else {}
        if self._reuse is not None:
            metrics["buffer/dropped"] = float(self._dropped)
        return metrics

    def dispose(self) -> None:
        """Close the database's connections."""
        self._heartbeat.stop()
        self._database.dispose()

    def _remove_earlier(self) -> None:
        """Remove the unused rows of a whole run's earlier attempts, if it begins at its first step:
        it makes them again, perhaps by another configuration.
        """
        if not self._begins_anew:
            return

        def attempt(connection: Connection) -> int:
            self._stop_if_replaced(connection)  # the rows are that process's
            self._claims.release(connection)
            return self._claims.rewind(connection, 0)

        if gone := self._transact(attempt):
            logger.info("%d experiences of an attempt without a checkpoint are removed", gone)
        self._begins_anew, self._knows_claims = False, True

    def _next_seal(self) -> str:
        """Return a name for the next checkpoint, with a higher number than any of this reader's."""
        if self._last_seal is None:
            seals = self._transact(self._claims.seals)
            self._last_seal = max(map(self._number_of, seals), default=0)
        self._last_seal += 1
        return f"{self._parties.name}/{self._last_seal}/{secrets.token_hex(8)}"

    def _number_of(self, seal: str) -> int:
        """Return the number of this reader's seal, from 1; 0 if the seal is another reader's."""
        reader, number, _ = seal.rsplit("/", 2)
        return int(number) if reader == self._parties.name else 0

    def _transact(
        self, attempt: Callable[[Connection], Result], gives_up: threading.Event | None = None
    ) -> Result:
        """Run `attempt` in a transaction; if the server goes away, retry until it is back.

        Raises TimeoutError if it is away for `max_read_timeout` seconds, the database's error once
        `gives_up` is set, and OSError for a full disk and the like.
        """

        def work() -> Result:
            with self._database.begin() as connection:
                return attempt(connection)

        database = f"buffer '{self.name}': its database {self._where}"
        retry_seconds = max(self._retry_seconds, POLL_FIRST)
        try:
            result = persist(
                work, patience=self._timeout, note=self._note_away,
                retry_seconds=retry_seconds, gives_up=gives_up,
            )  # fmt: skip
        except DBAPIError as error:
            if isinstance(error, OperationalError) and not is_away(error):
                raise OSError(f"{database} cannot be used: {first_line(error)}") from error
            if not is_away(error) or (gives_up is not None and gives_up.is_set()):
                raise
            raise TimeoutError(
                f"{database} was unreachable for {self._timeout:g} s (max_read_timeout): "
                f"{first_line(error)}"
            ) from error
        if self._away:
            self._away = False
            logger.warning("buffer '%s': its database is reachable again", self.name)
        return result

    def _note_away(self, error: DBAPIError) -> None:
        # it may or may not be committed: unknown claims are released
        self._knows_claims = False
        if not self._away:
            self._away = True
            logger.warning(
                "buffer '%s': its database %s is unreachable, waiting for it for %g s at most "
                "(max_read_timeout): %s",
                self.name, self._where, self._timeout, first_line(error),
            )  # fmt: skip

    def _at_once(self, attempt: Callable[[Connection], None]) -> None:
        """Run `attempt` in a transaction; if the server is away, only log that."""
        try:
            with self._database.begin() as connection:
                attempt(connection)
        except DBAPIError as error:
            if not is_away(error):
                raise
            self._note_away(error)

    async def _poll(
        self,
        attempt: Callable[[Connection], Result | None],
        waited_for: Callable[[], str],
        other: str,
        in_vain: Callable[[], None] = lambda: None,
        transact: Callable[..., Any] | None = None,
        gives_up: threading.Event | None = None,
    ) -> Result:
        """Run `attempt` in separate transactions, less and less often, until it returns a result.

        `in_vain()` is called after an attempt without result, if nothing was notified meanwhile. If
        the `other` side is missing, a warning says so long before the time-out. Cancelled, it sets
        `gives_up`: its thread then waits for no server.
        """
        gives_up = gives_up or threading.Event()
        seen = -1
        since = begun = self._clock.now()
        pause = POLL_FIRST

        def look(connection: Connection) -> tuple[Result | None, int]:
            if (result := attempt(connection)) is not None:
                return result, 0
            self._parties.gone(connection, other)  # which it watches from now on
            return None, self._claims.changes(connection)

        while True:
            notified = self._changed.notified
            try:
                result, changes = await asyncio.to_thread(
                    transact or self._transact, look, gives_up
                )
            except asyncio.CancelledError:
                gives_up.set()
                raise
            if result is not None:
                return result
            if self._changed.notified != notified:
                continue  # that attempt may have missed rows that were put meanwhile
            in_vain()
            if changes != seen:
                seen, since, pause = changes, self._clock.now(), POLL_FIRST
            left = since + self._timeout - self._clock.now()
            if left <= 0:
                raise TimeoutError(waited_for())
            if not self._noted and self._clock.now() - begun > NOTED:
                if missing := self._missing(other):
                    logger.warning("waiting on buffer '%s'%s", self.name, missing)
                    self._noted = True
                begun = self._clock.now()
            await self._changed.wait(min(pause, left))
            pause = min(2 * pause, POLL_LONGEST)

    def _try_put(
        self, connection: Connection, rows: list[dict[str, Any]], pictures: Sequence[Picture]
    ) -> bool | None:
        """True when the rows are in; None while the buffer is full."""
        ended = self._parties.ended(connection, "train")
        ended = ended or self._parties.left(connection, "explore")
        self._stop_if_failed(connection)  # checked last: a side that has failed has also ended
        if ended:
            raise Closed(f"buffer '{self.name}' is closed")
        if self._reuse is None and self._is_full(connection):
            return None
        self._pictures.put(connection, pictures)
        there = self._claims.add(connection, rows)
        if there:
            self._report_known(connection, there)
        self._began = True
        if self._reuse is not None:
            self._dropped += self._claims.drop_lowest(connection, self._capacity)
        return True

    def _report_known(self, connection: Connection, groups: set[str]) -> None:
        """Report groups that were there already, whose experiences are not put again.

        Raises ValueError if a whole run begins with groups that another has trained: its own
        rollouts would be lost, and nothing would come to train.
        """
        if self._role != "both" or self._began:  # they may be its own, put again
            logger.info("%d groups were in buffer '%s' already", len(groups), self.name)
            return
        if not self._continued and (used := self._claims.used_up(connection, groups)):
            raise ValueError(
                f"buffer '{self.name}': {used} groups of the first step are in "
                f"{self._where} already and have been trained, by another run or before its "
                "checkpoints were removed: give trainer_input.experience_buffer another name or "
                "path, or remove that table"
            )
        logger.warning(
            "%d groups were in buffer '%s' already, of another run: those are trained, and this "
            "run's own experiences of the same steps and tasks are left out. For an empty buffer, "
            "give trainer_input.experience_buffer another name or path",
            len(groups), self.name,
        )  # fmt: skip

    def _is_full(self, connection: Connection) -> bool:
        """Return whether the buffer holds as many steps as allowed, and no reader waits
        for more.
        """
        if self._claims.count(connection, most=self._capacity) < self._capacity:
            return False  # not even with one experience a step
        if self._claims.steps(connection) < self._capacity:
            return False
        return not self._starves(connection)

    def _starves(self, connection: Connection) -> bool:
        return self._parties.wanted(connection) > self._claims.count(connection)

    def _try_take(
        self, connection: Connection, n: int, oldest: float
    ) -> list[tuple[int, int, Experience]] | None:
        """Claim and return rows; an empty list at the end; None while there are too few."""
        if self._gives_up.is_set():
            return []
        ended = self._parties.ended(connection, "explore")
        ended = ended or self._parties.left(connection, "train")
        self._stop_if_failed(connection)  # checked last: a side that has failed has also ended
        self._settle_claims(connection)
        has = self._claims.count(connection, ended=ended, most=n)
        self._parties.want(connection, n if has < n and not ended else 0)
        if has < n and not ended:
            return None
        least = 1 if ended else n
        read = partial(self._read, lru_cache(partial(self._pictures.get, connection)))

        def is_older(row: int, experience: Experience) -> bool:
            if older := experience.is_older(oldest):
                self._older[row] = experience
            return older

        claimed = self._claims.claim(connection, n, read, is_older, least=least, ended=ended)
        if self._reuse is not None:
            for _, use, experience in claimed:
                experience.info["use_count"] = use
        # None: another reader is just taking them, or the rows were damaged or too old
        return claimed if claimed or not has else None

    def _end_take(self, before: set[int], seal: str | None, connection: Connection) -> None:
        """Release what a cancelled take has claimed, and wait for nothing more."""
        self._claims.release(connection, but=before, seal=seal)
        self._parties.want(connection, 0)

    def _read(self, stored: Stored, row: int, data: bytes) -> Experience | None:
        """Return a row's experience; None if it is damaged and may be left out."""
        try:
            return decode(data, stored)[0]
        except Damaged as error:
            which = f"row {row} of table {self.name} in {self._where} is damaged ({error})"
            if self._on_error == "fail":
                raise ValueError(
                    f"{which}: expected it as it was put, from a backup of the database; "
                    "on_error: skip of the buffer trains without it"
                ) from error
        if row not in self._damaged:
            self._damaged.add(row)
            logger.warning("%s and left out: %d so far", which, len(self._damaged))
        return None

    def _settle_claims(self, connection: Connection) -> None:
        """Release the claims of this reader's last process, and those of silent readers."""
        if not self._knows_claims:
            self._claims.release(connection, but=self._held, seal=self._seal)
            self._older = {}  # released as well
            self._knows_claims = True
        silent = self._parties.silent(connection, "train")
        if silent and (back := self._claims.release_of(connection, silent)):
            names = ", ".join(silent)
            logger.warning("%d experiences of silent readers (%s) are available again", back, names)

    def _missing(self, role: str) -> str:
        return self._transact(lambda connection: self._parties.missing(connection, role))

    def _stop_if_failed(self, connection: Connection) -> None:
        failed = self._parties.failure(connection)
        if failed is not None:
            raise RuntimeError(
                f"buffer '{self.name}': the other side has failed: {failed}"
            ) from self._failure
        self._stop_if_replaced(connection)

    def _stop_if_replaced(self, connection: Connection) -> None:
        if not self._parties.mine(connection):
            raise RuntimeError(
                f"buffer '{self.name}': another process uses it under the name "
                f"'{self._parties.name}': explorers and trainers need names of their own "
                "(explorer.name, trainer.name)"
            )


def _rows_of(experiences: Sequence[Experience]) -> list[dict[str, Any]]:
    """Return the columns of experiences; their pictures are in a table of their own."""
    encoded = encode_each([[e] for e in experiences], pictures=False)
    return [row_of(e, data) for e, data in zip(experiences, encoded, strict=True)]


def _beat(database: Engine, parties: Parties) -> Callable[[], None]:
    """Return the heartbeat's work, which holds no reference to the buffer."""

    def beat() -> None:
        with database.begin() as connection:
            parties.beat(connection)

    return beat

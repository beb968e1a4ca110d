"""Table: stores experiences in a database, for the copy and for the SQL buffer alike."""

from __future__ import annotations

import sqlite3
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    extract,
    func,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.schema import CreateColumn

from trireme.experience import EID, Experience
from trireme.log import get_logger, hide_passwords
from trireme.text import storable

logger = get_logger("queue_experience_buffer")

Result = TypeVar("Result")
RETRY_SECONDS = 0.5
"""Seconds between two tries to reach a server that has gone away."""
BUSY_SECONDS = 60
"""Seconds that a process waits for another's transaction."""


def experience_table(name: str, metadata: MetaData) -> Table:
    """Make the table, one row per experience. `consumed` counts committed uses in training; -1:
    dropped.
    """
    table = Table(
        name,
        metadata,
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("timestamp", Float, nullable=False),
        Column("batch", Integer, nullable=False),  # explore step, which a resume rewinds to
        Column("source", String, nullable=False),  # the step, and whose, where several explore
        Column("task_id", String, nullable=False),  # batch/task: the group
        Column("run_id", String, nullable=False),  # batch/task/run
        Column("msg_id", String, nullable=False, unique=True),  # the whole id
        Column("model_version", Integer, nullable=False),
        Column("reward", Float),
        Column("prompt_text", Text),
        Column("response_text", Text),
        Column("priority", Float, nullable=False),  # its group's oldest version, for replay
        Column("consumed", Integer, nullable=False),
        Column("claimed_by", String),  # the reader that took it and has not committed yet
        Column("used", Integer, nullable=False),  # how often that reader has taken it since
        Column("sealed", String),  # the pending or last checkpoint of that reader
        Column("consumed_by", String),  # the seals that made its uses final, for a rollback
        Column("dropped_at", Integer),  # the newest row when it had no room any more
        Column("ready_at", Float, nullable=False),  # when it may be used again (replay)
        Column("experience_bytes", LargeBinary, nullable=False),
        Index(f"ix_{name}_task", "task_id"),
        Index(f"ix_{name}_open", "consumed", "claimed_by", "id"),
    )
    # a checkpoint looks for the rows of one reader, and of one seal, among those of the whole run
    for column in (table.c.claimed_by, table.c.sealed):
        some = column.is_not(None)
        Index(f"ix_{name}_{column.name}", column, sqlite_where=some, postgresql_where=some)
    return table


def picture_table(name: str, metadata: MetaData) -> Table:
    """Make the table of the pictures of an experience table, one row per picture."""
    return Table(
        f"{name}_pictures",
        metadata,
        Column("digest", String, primary_key=True),
        Column("data", LargeBinary, nullable=False),
    )


def block_table(name: str, metadata: MetaData) -> Table:
    """Make the table of the blocks of a copy, whose rows have the number of one as `block`."""
    return Table(
        name,
        metadata,
        Column("id", Integer, primary_key=True, autoincrement=False),
        Column("data", LargeBinary, nullable=False),
    )


def row_of(experience: Experience, data: bytes) -> dict[str, Any]:
    """Return the columns of an experience with these bytes."""
    eid, version = experience.eid, experience.version
    return {
        "timestamp": time.time(),
        "batch": batch_number(eid),
        "source": str(eid.batch),
        "task_id": eid.tid,
        "run_id": eid.rid,
        "msg_id": eid.uid,
        "model_version": version,
        "reward": experience.reward,
        "prompt_text": _column(experience.prompt_text),
        "response_text": _column(experience.response_text),
        "priority": float(version),
        "consumed": 0,
        "used": 0,
        "ready_at": 0.0,
        "experience_bytes": data,
    }


def _column(text: str | None) -> str | None:
    """Make a text fit for a column that people read; the bytes keep the text unchanged."""
    return None if text is None else storable(text)


def batch_number(eid: EID) -> int:
    """Return the explore step of an id; evaluation ids are `step/name`, foreign ones count as step
    0.
    """
    head = str(eid.batch).split("/")[0]
    return int(head) if head.isdigit() else 0


def resolve_url(path: str, folder: Path) -> str:
    """Return the database that a YAML's `path` means: a relative SQLite file is in `folder`."""
    if "://" not in path:
        return f"sqlite:///{folder / path}"
    url = make_url(path)
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return path
    return url.set(database=str(folder / url.database)).render_as_string(hide_password=False)


def open_database(
    url: str, metadata: MetaData, *, retries: int = 0, retry_seconds: float = 1.0
) -> Engine:
    """Open a database and create its tables. SQLite: WAL, so that readers and a writer don't block.

    A server that does not answer is tried `retries` more times. Raises ValueError, naming the
    database, if it cannot be opened or is of another kind.
    """
    known_as = hide_passwords(url)
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):  # other URLs name their driver
            parsed = parsed.set(drivername="postgresql+psycopg")
        sqlite = parsed.get_backend_name() == "sqlite"
        engine = create_engine(parsed, pool_pre_ping=not sqlite)
    except (ArgumentError, NoSuchModuleError) as error:
        raise ValueError(
            f"database '{known_as}' is of a kind that is not known here: expected a file, "
            "sqlite:///<file> or postgresql://<user>@<host>/<database>"
        ) from error
    except ModuleNotFoundError as error:
        raise ValueError(
            f"database '{known_as}' needs the package '{error.name}': for PostgreSQL, "
            f"pip install 'trireme-rl[postgres]'"
        ) from error
    if sqlite and parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    if sqlite:
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_immediate)
    while True:
        try:
            _make_tables(engine, metadata)
            return engine
        except DatabaseError as error:
            if not isinstance(error, OperationalError) or sqlite or retries <= 0:
                raise ValueError(f"database '{known_as}' cannot be used: {error.orig}") from error
            retries -= 1
            logger.warning("database '%s' cannot be reached, trying again", known_as)
            time.sleep(retry_seconds)


def is_away(error: DBAPIError) -> bool:
    """Return whether an error means that the server cannot be reached, not even by a new
    connection.
    """
    if isinstance(error.orig, sqlite3.Error):
        return False  # a file: waiting would not help
    connecting = isinstance(error, OperationalError) and error.statement is None
    return error.connection_invalidated or connecting


def is_damaged(error: DBAPIError) -> bool:
    """Return whether an error means that a file is no SQLite database any more, or a
    damaged one.
    """
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF  # the primary code
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


def first_line(error: DBAPIError) -> str:
    """Return the database's own message, without SQL."""
    return str(error.orig).strip().partition("\n")[0]


def database_time(connection: Connection) -> float:
    """Return the time in seconds by the clock that all users of the database share."""
    if connection.dialect.name == "sqlite":
        return time.time()
    return float(connection.scalar(select(extract("epoch", func.clock_timestamp()))) or 0.0)


def one_at_a_time(connection: Connection, what: str) -> None:
    """Wait until no other transaction does `what`; SQLite's transactions are exclusive by
    themselves.
    """
    if connection.dialect.name == "postgresql":
        key = zlib.crc32(what.encode())
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})


def in_turn(
    engine: Engine, what: str, change: Callable[[Connection], None], *, patience: float
) -> None:
    """Make a change in a transaction, once no other one does `what`. If the server goes away, it is
    waited for `patience` seconds, and the change is made again: it may have been made already.
    """
    where, away = engine.url.render_as_string(), False

    def work() -> None:
        with engine.begin() as connection:
            one_at_a_time(connection, what)
            change(connection)

    def note(error: DBAPIError) -> None:
        nonlocal away
        if not away:
            away = True
            logger.warning(
                "database '%s' is unreachable, waiting for it for %g s at most "
                "(max_read_timeout): %s",
                where, patience, first_line(error),
            )  # fmt: skip

    persist(work, patience=patience, note=note)
    if away:
        logger.warning("database '%s' is reachable again", where)


def persist(
    work: Callable[[], Result],
    *,
    patience: float,
    note: Callable[[DBAPIError], None],
    retry_seconds: float = RETRY_SECONDS,
    gives_up: threading.Event | None = None,
) -> Result:
    """Return what transactions give; if their server goes away, run them again until it is back.
    They may have been committed already.

    `note` hears of each error that means so. Raises the last one after `patience` seconds, or once
    `gives_up` is set.
    """
    gives_up = gives_up or threading.Event()
    since = time.monotonic()
    while True:
        try:
            return work()
        except DBAPIError as error:
            if not is_away(error) or gives_up.is_set() or time.monotonic() - since >= patience:
                raise
            note(error)
            gives_up.wait(retry_seconds)


def _make_tables(engine: Engine, metadata: MetaData) -> None:
    with engine.begin() as connection:
        one_at_a_time(connection, "trireme: tables")
        metadata.create_all(connection)
        for table in metadata.tables.values():
            _add_new_columns(connection, table)
            for index in table.indexes:  # an earlier version's table may lack some
                index.create(connection, checkfirst=True)


def _add_new_columns(connection: Connection, table: Table) -> None:
    """Add the columns that an earlier version's table lacks. Raises ValueError for other tables."""
    there = {column["name"] for column in inspect(connection).get_columns(table.name)}
    missing = [column for column in table.columns if column.name not in there]
    if needed := [column.name for column in missing if not column.nullable]:
        known_as = connection.engine.url.render_as_string()
        raise ValueError(
            f"database '{known_as}' has a table '{table.name}' without "
            f"{', '.join(map(repr, needed))}: another version or program made it; expected another "
            "name or path of the buffer"
        )
    name = connection.dialect.identifier_preparer.format_table(table)
    for column in missing:
        new = CreateColumn(column).compile(dialect=connection.dialect)
        connection.execute(text(f"ALTER TABLE {name} ADD COLUMN {new}"))
        logger.info("table '%s' of an earlier version: column '%s' added", table.name, column.name)


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    # the driver's own BEGIN comes too late to lock out other processes: see _begin_immediate
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


def _begin_immediate(connection: Any) -> None:
    """Take the write lock at once: data that a transaction read is then unchanged when it
    writes.
    """
    reads = connection.get_execution_options().get("reads_only", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

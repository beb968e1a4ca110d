"""Table: how experiences lie in a database, the same for the copy and for the real SQL buffer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
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
    make_url,
)
from sqlalchemy.exc import DatabaseError

from trireme.experience import EID, Experience
from trireme.serialize import encode

BUSY_SECONDS = 60
"""How long one process waits for another's transaction before it gives up."""


def experience_table(name: str, metadata: MetaData) -> Table:
    """One row an experience. `consumed` is how often it was trained on, for good."""
    return Table(
        name,
        metadata,
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("timestamp", Float, nullable=False),
        Column("batch", Integer, nullable=False),  # explore step, what a resume goes back to
        Column("task_id", String, nullable=False),  # batch/task: the group
        Column("run_id", String, nullable=False),  # batch/task/run
        Column("msg_id", String, nullable=False, unique=True),  # the whole id
        Column("model_version", Integer, nullable=False),
        Column("reward", Float),
        Column("prompt_text", Text),
        Column("response_text", Text),
        Column("consumed", Integer, nullable=False, default=0),
        Column("claimed_by", String),  # the reader that took it and has not committed yet
        Column("experience_bytes", LargeBinary, nullable=False),
        Index(f"ix_{name}_task", "task_id"),
        Index(f"ix_{name}_open", "consumed", "claimed_by", "id"),
    )


def row_of(experience: Experience) -> dict[str, Any]:
    """The columns of an experience."""
    eid = experience.eid
    return {
        "timestamp": time.time(),
        "batch": batch_number(eid),
        "task_id": eid.tid,
        "run_id": eid.rid,
        "msg_id": eid.uid,
        "model_version": experience.version,
        "reward": experience.reward,
        "prompt_text": experience.prompt_text,
        "response_text": experience.response_text,
        "consumed": 0,
        "experience_bytes": encode([experience]),
    }


def batch_number(eid: EID) -> int:
    """The explore step of an id; evaluation ids are `step/name`, foreign ones count as step 0."""
    head = str(eid.batch).split("/")[0]
    return int(head) if head.isdigit() else 0


def resolve_url(path: str, folder: Path) -> str:
    """The database that a YAML's `path` means: a relative SQLite file lies in `folder`."""
    if "://" not in path:
        return f"sqlite:///{folder / path}"
    url = make_url(path)
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return path
    return str(url.set(database=str(folder / url.database)))


def open_database(url: str, metadata: MetaData) -> Engine:
    """An engine with its tables made. SQLite: WAL, so that readers and a writer don't block.

    Raises ValueError, naming the database, where it cannot be opened.
    """
    parsed = make_url(url)
    sqlite = parsed.get_backend_name() == "sqlite"
    if sqlite and parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url)
    if sqlite:
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_immediate)
    try:
        metadata.create_all(engine)
    except DatabaseError as error:
        raise ValueError(f"database '{url}' cannot be used: {error.orig}") from error
    return engine


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    # the driver's own BEGIN comes too late to hold off other processes: see _begin_immediate
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


def _begin_immediate(connection: Any) -> None:
    """Take the write lock at once: what a transaction read is still so when it writes."""
    reads = connection.get_execution_options().get("reads_only", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

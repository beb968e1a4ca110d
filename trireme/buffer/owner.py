"""Owner: the job whose copy of experiences it is, where the copy is outside the job's folder.

A job removes from its copy what an earlier attempt wrote, and replaces equal ids: a second job with
the same path would delete the first one's experiences.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from trireme.buffer.blocks import OWNER, TABLE
from trireme.files import Unreadable, read_json


def refuse_other(
    copy_: str, owner: str | None, filled: bool, *, job: Path, key: str, resumes: bool
) -> None:
    """Raise ValueError if the copy, named by `key` of the YAML, is not that of the job in folder
    `job`, resolved. `owner` is the folder that the copy names, None if it names none; `filled`: it
    has experiences.

    A job that resumes owns a copy without an owner, as earlier versions left it, and one whose
    owner's folder is gone: its own was renamed.
    """
    if not (owner or filled) or (owner and Path(owner).resolve() == job):
        return
    if resumes and (owner is None or not Path(owner).is_dir()):
        return
    whose = f"is the copy of the job in {owner}" if owner else "has experiences but names no job"
    raise ValueError(
        f"{key}: {copy_} {whose}, and this run, in {job}, would remove its experiences: expected a "
        "path that no other job has, or that copy moved away"
    )


def owner_note(lines: Path) -> Path:
    """Return the file that names the job whose copy a file of lines is."""
    return lines.with_name(f"{lines.name}.owner.json")


def owner_of(path: Path) -> tuple[str | None, bool]:
    """Return the owner of the copy in a file, and whether it has experiences, as `refuse_other`
    takes them, without changing it and without SQLAlchemy. One that cannot be read has neither: the
    run finds out.
    """
    try:
        if path.suffix in (".jsonl", ".json"):
            return _owner_of_lines(path)
        return _owner_of_rows(path)
    except (OSError, ValueError, sqlite3.Error):
        return None, False


def _owner_of_lines(path: Path) -> tuple[str | None, bool]:
    with open(path, "rb") as file:
        filled = file.readline().endswith(b"\n")
    try:
        note: dict[str, Any] = read_json(owner_note(path))
    except (FileNotFoundError, Unreadable):
        note = {}
    return note.get("job"), filled


def _owner_of_rows(path: Path) -> tuple[str | None, bool]:
    # without a log of a run that writes it, a reader would make files beside the database
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as database:
        named = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = {name for (name,) in named}
        job = f"SELECT job FROM {OWNER}"
        owner = database.execute(job).fetchone() if OWNER in tables else None
        row = f"SELECT id FROM {TABLE} LIMIT 1"
        filled = TABLE in tables and database.execute(row).fetchone() is not None
    return (owner[0] if owner else None), filled

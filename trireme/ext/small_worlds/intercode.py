"""InterCode: a question to a database, asked of it in SQL turn by turn (arXiv:2306.14898).

A reply has one statement in <action>, and sees its rows or its error; `submit` ends the episode.
Statements only read, in the sandbox of `same_rows`, which also sets the reward: 1 if the last query
returns the rows of the right one. The row has `databases` (scripts that make them: the first is
visible, all are compared), `database` (one script), or `db_path` (a file of SQLite).
"""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from trireme.ext.agents.command import options_of
from trireme.ext.agents.program import middle_out
from trireme.ext.sandbox.programs import LONGEST, run, same_rows
from trireme.task import Task
from trireme.text import joined
from trireme.workflows.episode import EpisodeWorkflow

SYSTEM_PROMPT = """You answer a question by reading an SQLite database, one statement at a time.

Before each statement think briefly. Answer with your thoughts between <think> and </think> and \
one statement between <action> and </action>: you see its rows, or its error. SHOW TABLES and \
DESCRIBE name tables and their columns. When the last statement's rows answer the question, answer \
with <action>submit</action>.

An example:
<think>I need the columns first.</think>
<action>DESCRIBE people</action>"""
SUBMIT = "submit"
SHOWN = 20
"""Rows of a result that are shown."""
_SHOW = re.compile(r"\s*show\s+tables\s*;?\s*", re.IGNORECASE)
_DESCRIBE = re.compile(r"\s*desc(?:ribe)?\s+[`\"']?(\w+)[`\"']?\s*;?\s*", re.IGNORECASE)


class Settings(BaseModel):
    """`workflow_args`."""

    model_config = ConfigDict(extra="forbid")

    max_env_steps: Annotated[int, Field(gt=0)] = 10
    """Most statements of an episode, `submit` included."""


class Database:
    """One episode's questions to a database."""

    def __init__(self, task: Task) -> None:
        self._task, self._databases = task, databases_of(task)
        self._last: str | None = None

    def reset(self) -> str:
        """Return the question."""
        self._last = None
        return str(self._task.prompt)

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Run a statement; at `submit` the reward is that of the last query that ran."""
        if action.strip().rstrip(";").lower() == SUBMIT:
            if self._last is None:
                return "There is nothing to submit.", 0.0, True, {"valid": False}
            scored = await same_rows(self._task, self._last, databases=self._databases)
            return "Submitted.", scored["accuracy"], True, {"valid": True}
        if not action.strip():
            return "Write one statement in <action>, or submit.", 0.0, False, {"valid": False}
        if len(action) > LONGEST:
            return "Error: the statement is too long.", 0.0, False, {"valid": False}
        action = joined(action)  # as the conversation shows it; SQLite refuses half a pair
        query = in_sqlite(action)
        job = {"query": query, "databases": self._databases[:1], "most": SHOWN}
        told = await asyncio.to_thread(run, json.dumps(job))
        if not isinstance(told, dict):
            late = "Error: it takes too long, or gives more than 1 MB of rows."
            return late, 0.0, False, {"valid": False}
        if "rows" not in told:
            return f"Error: {told.get('error')}", 0.0, False, {"valid": False}
        if query == action:  # looking up the tables is no answer
            self._last = action
        lines = [_line(row) for row in told["rows"]] or ["(no rows)"]
        left = told["count"] - len(told["rows"])
        lines += [f"... ({left} more rows)"] if left > 0 else []
        return middle_out("\n".join(lines)), 0.0, False, {"valid": True}


class InterCodeSqlWorkflow(EpisodeWorkflow):
    """1 where the last query before `submit` gives the rows of the right one, else 0."""

    blocking_env = False
    max_env_steps = 10
    unfinished_reward = 0.0
    default_system_prompt = SYSTEM_PROMPT
    tagged_actions = True
    examines_rows = True

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for an option, and a row without a database or the right query."""
        options_of(task, Settings, "intercode_sql_workflow")
        refuse_databases(task)
        if not isinstance(task.truth, str) or not task.truth.strip():
            raise ValueError(
                f"the row's column '{task.truth_key}' (format.response_key) is {task.truth!r:.60}: "
                "expected the right query"
            )

    def make_env(self) -> Database:
        """Make the database of the row."""
        return Database(self.task)


def in_sqlite(statement: str) -> str:
    """Translate SHOW TABLES and DESCRIBE to SQLite; anything else is unchanged."""
    if _SHOW.fullmatch(statement):
        return "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
    if match := _DESCRIBE.fullmatch(statement):
        return f"SELECT sql FROM sqlite_master WHERE lower(name) = lower('{match[1]}')"
    return statement


def databases_of(task: Task) -> list[str]:
    """Return the scripts that make a row's databases. Raises ValueError if it has none."""
    if (file := _file_of(task)) is not None:
        return [_script(file, file.stat().st_mtime_ns)]
    row = task.raw_task
    scripts = row.get("databases") or ([row["database"]] if row.get("database") else [])
    if not scripts or not all(isinstance(script, str) for script in scripts):
        raise ValueError(
            "intercode_sql_workflow needs a column databases (a list of scripts), database (one "
            f"script) or db_path (a file of SQLite): the row has {', '.join(row)}"
        )
    return list(scripts)


def refuse_databases(task: Task) -> None:
    """Raise ValueError as `databases_of` does, without reading a whole file: the files of a data
    set may be gigabytes.
    """
    if (file := _file_of(task)) is None:
        databases_of(task)
    else:
        _refuse_file(file, file.stat().st_mtime_ns)


def _file_of(task: Task) -> Path | None:
    if not (path := task.raw_task.get("db_path")):
        return None
    file = Path(str(path)).expanduser()
    if not file.is_file():
        raise ValueError(f"the row's db_path is '{path}': there is no such file")
    return file


@cache
def _refuse_file(file: Path, changed: int) -> None:
    """Raise ValueError for a file that is not of SQLite, and for tables that cannot be copied."""
    with _opened(file) as base:
        virtual = "SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL TABLE%'"
        names = [name for (name,) in base.execute(virtual)]
    if names:
        raise ValueError(
            f"the row's db_path is '{file}', whose tables {', '.join(names)} are virtual ("
            "full-text search, for example): expected plain tables alone"
        )


@lru_cache(maxsize=32)
def _script(file: Path, changed: int) -> str:
    """Return the SQL that makes the same database in memory. Raises ValueError if none does."""
    _refuse_file(file, changed)
    with _opened(file) as base:
        base.text_factory = lambda text: text.decode("utf-8", "replace")
        script = "\n".join(base.iterdump())
    try:
        with closing(sqlite3.connect(":memory:")) as copy:
            copy.executescript(script)
    except sqlite3.Error as error:
        raise ValueError(
            f"the row's db_path is '{file}', which cannot be copied: {error}"
        ) from error
    return script


@contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a database to read. Raises ValueError for an error of it."""
    try:
        with closing(sqlite3.connect(f"file:{file.absolute()}?mode=ro", uri=True)) as base:
            yield base
    except sqlite3.DatabaseError as error:
        raise ValueError(
            f"the row's db_path is '{file}', which is no SQLite file: {error}"
        ) from error


def _line(row: list[Any]) -> str:
    """Return a row as the model sees it, a BLOB in SQLite's form."""
    cells = [f"x'{cell['blob']}'" if isinstance(cell, dict) else repr(cell) for cell in row]
    return f"({', '.join(cells)}{',' * (len(cells) == 1)})"

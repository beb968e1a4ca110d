"""A database that is read statement by statement, in the sandbox."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.model.fake import make
from tests.workflows.made import examine_rows
from trireme.experience import Experience
from trireme.ext.small_worlds.intercode import Database
from trireme.task import Task
from trireme.workflows.workflow import resolve

SCRIPT = "CREATE TABLE people (name, age); INSERT INTO people VALUES ('Ann', 3), ('Bo', 5);"
OTHER = "CREATE TABLE people (name, age); INSERT INTO people VALUES ('Cy', 8);"
RIGHT = "SELECT name FROM people WHERE age > 4"
ROW = {"prompt": "Who is older than 4?", "response": RIGHT, "databases": [SCRIPT, OTHER]}


def play(*actions: str, row: dict[str, Any] = ROW) -> tuple[Experience, list[str]]:
    task, spec = Task(row), resolve("intercode_sql_workflow")
    assert spec.examine is not None
    spec.examine(task)
    replies = [f"<action>{action}</action>" for action in actions]
    [e] = asyncio.run(spec.call(task, make(replies), 1, 0))
    return e, [m["content"] for m in e.messages or [] if m["role"] == "user"]


def test_the_last_query_is_judged_in_all_databases() -> None:
    e, seen = play("SHOW TABLES", "desc people;", f"{RIGHT};", "submit")
    assert e.reward == 1.0 and e.metrics["env_done"] == 1.0
    create = "('CREATE TABLE people (name, age)',)"
    assert seen == ["Who is older than 4?", "('people',)", create, "('Bo',)"]
    e, _ = play("SELECT 'Bo'", "submit")  # right in the first alone
    assert e.reward == 0.0
    e, _ = play(RIGHT, "SELECT nothing", "SHOW TABLES", "submit")  # what failed is no query
    assert e.reward == 1.0


def test_what_a_statement_may_not_do_is_said_and_does_not_happen() -> None:
    statements = ["DROP TABLE people", "ATTACH '/tmp/x' AS y", "SELECT nam FROM people", "", "a; b"]
    e, seen = play(*statements, RIGHT, "submit")
    assert seen[1:3] == ["Error: not authorized"] * 2 and seen[3] == "Error: no such column: nam"
    assert seen[4].startswith("Write one statement") and seen[5].startswith("Error:")
    assert e.reward == 1.0


def test_half_a_surrogate_pair_is_a_character_and_no_late_statement() -> None:
    async def seen(*actions: str) -> list[str]:
        database = Database(Task(ROW))
        return [(await database.step(action))[0] for action in actions]

    said = asyncio.run(seen("SELECT '\ud800'", "SELECT '\ud83d\ude00'", f"{RIGHT} -- \udfff"))
    assert said == ["('\ufffd',)", "('\U0001f600',)", "('Bo',)"]


def test_without_a_submission_there_is_no_reward() -> None:
    e, _ = play("submit")
    assert e.reward == 0.0
    e, _ = play(*[RIGHT] * 10)
    assert e.reward == 0.0 and e.metrics["env_done"] == 0.0


def test_long_results_are_cut_and_endless_ones_end() -> None:
    count = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n{}) SELECT x FROM n"
    _, seen = play(count.format(" WHERE x < 50"), count.format(""), "submit")
    assert seen[1].endswith("(20,)\n... (30 more rows)") and "too long" in seen[2]
    _, seen = play("SELECT hex(zeroblob(10000))", "submit")
    assert seen[1].startswith("('000") and len(seen[1]) < 4100 and "are left out" in seen[1]


def test_a_blob_is_shown_and_compared() -> None:
    query = "SELECT NULL, x'00ff', 1.5, name FROM people WHERE age = 5"
    e, seen = play(query, "submit", row={**ROW, "response": query, "databases": [SCRIPT]})
    assert e.reward == 1.0 and seen[1] == "(None, x'00ff', 1.5, 'Bo')"
    text = "SELECT NULL, '00ff', 1.5, name FROM people WHERE age = 5"
    e, _ = play(text, "submit", row={**ROW, "response": query, "databases": [SCRIPT]})
    assert e.reward == 0.0


def test_an_option_that_there_is_not_is_refused() -> None:
    examine = resolve("intercode_sql_workflow").examine
    assert examine is not None
    examine(Task(ROW, workflow_args={"max_env_steps": 3}))
    with pytest.raises(ValueError, match="did you mean 'max_env_steps'"):
        examine(Task(ROW, workflow_args={"max_env_stps": 3}))


def test_a_file_of_sqlite(tmp_path: Path) -> None:
    base = sqlite3.connect(tmp_path / "a.sqlite")
    base.executescript(SCRIPT)
    base.close()
    row = {**ROW, "databases": None, "db_path": str(tmp_path / "a.sqlite")}
    assert play(RIGHT, "submit", row=row)[0].reward == 1.0
    latin = sqlite3.connect(tmp_path / "latin.sqlite")
    latin.executescript(SCRIPT + "INSERT INTO people VALUES (CAST(x'e9' AS TEXT), 9);")
    latin.close()
    e, seen = play(RIGHT, "submit", row={**row, "db_path": str(tmp_path / "latin.sqlite")})
    assert e.reward == 1.0 and seen[1] == "('Bo',)\n('\ufffd',)"
    full_text = sqlite3.connect(tmp_path / "fts.sqlite")
    full_text.executescript(SCRIPT + "CREATE VIRTUAL TABLE words USING fts5(a);")
    full_text.close()
    (tmp_path / "b.sqlite").write_text("no database, but some text that is long enough for one")
    for changes, said in (
        ({"db_path": str(tmp_path / "b.sqlite")}, "no SQLite file"),
        ({"db_path": str(tmp_path / "fts.sqlite")}, "tables words are virtual"),
        ({"db_path": str(tmp_path / "gone")}, "there is no such file"),
        ({"db_path": None}, "needs a column databases"),
        ({"response": None}, "expected the right query"),
    ):
        with pytest.raises(ValueError, match=said):
            play(row={**row, **changes})


def test_a_later_row_is_examined_before_the_run(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.sqlite") as base:
        base.executescript(SCRIPT)
    row = {**ROW, "databases": None, "db_path": str(tmp_path / "a.sqlite")}
    rows = [row, row, {**row, "db_path": str(tmp_path / "gone.sqlite")}]
    examine_rows("intercode_sql_workflow", rows[:2])
    with pytest.raises(ValueError, match=r"dataset 'x', row 2: .*gone.sqlite': there is no such"):
        examine_rows("intercode_sql_workflow", rows)

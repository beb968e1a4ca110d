"""Tasks that lie in a database's table."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from trireme.config.schema_rollout import TasksetConfig
from trireme.data.rows import NoRows, load_rows
from trireme.launch.tasksets import rows_of


@pytest.fixture
def url(tmp_path: Path) -> str:
    with sqlite3.connect(tmp_path / "tasks.db") as store:
        store.execute("create table sums (id integer primary key, question text, answer text)")
        store.executemany("insert into sums values (?, ?, ?)",
                          [(2, "2 + 2?", "4"), (1, "1 + 1?", "2")])  # fmt: skip
        store.execute("create table theirs (id integer primary key, raw_task json)")
        store.execute("insert into theirs values (1, ?)", (json.dumps({"question": "q"}),))
    return f"sqlite:///{tmp_path / 'tasks.db'}"


def test_a_table_is_a_data_set_in_the_order_of_its_key(url: str) -> None:
    rows = load_rows(url, "sums")
    assert rows.columns == ("id", "question", "answer")
    assert [row["answer"] for row in rows] == ["2", "4"]
    assert len(load_rows(url, "sums", "train[:1]")) == 1
    assert list(load_rows(url, "theirs")) == [{"question": "q"}]


@pytest.mark.parametrize("kind", ["json", "text"])
@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ('{"a": 1, "a": 2}', "an object has the name 'a' more than once: with 1 and 2"),
        ('{"a": 1', "Expecting ',' delimiter"),
    ],
)
def test_a_cell_that_is_not_json_is_named_with_its_row(
    tmp_path: Path, kind: str, cell: str, said: str
) -> None:
    with sqlite3.connect(tmp_path / "tasks.db") as store:
        store.execute(f"create table theirs (id integer primary key, raw_task {kind})")
        rows = [(1, '{"question": "q"}'), (2, cell)]
        store.executemany("insert into theirs values (?, ?)", rows)
    with pytest.raises(NoRows, match=f"not JSON: row 1: {said}"):
        load_rows(f"sqlite:///{tmp_path / 'tasks.db'}", "theirs")


def test_a_taskset_may_have_its_tables_name(url: str) -> None:
    config = TasksetConfig(name="sums", storage_type="sql", path=url)
    assert len(rows_of(config)) == 2


@pytest.mark.parametrize(
    ("table", "split", "says"),
    [
        ("none", "train", "has no table 'none'. Its tables: sums, theirs"),
        (None, "train", "has several tables, and subset_name names none"),
        ("sums", "test", "has no split 'test': a table has only train"),
    ],
)
def test_what_a_database_has_not_is_said(
    url: str, table: str | None, split: str, says: str
) -> None:
    with pytest.raises(NoRows, match=says):
        load_rows(url, table, split)


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NoRows, match="cannot be read: unable to open database file"):
        load_rows(f"sqlite:///{tmp_path / 'no.db'}", "sums")
    assert not (tmp_path / "no.db").exists()
    with pytest.raises(NoRows, match="is not a database: expected sqlite"):
        rows_of(TasksetConfig(storage_type="sql", path="tasks.jsonl"))


@pytest.mark.parametrize("name", ["a b.db", "a%20b.db", "a#1.db", "q?.db"])
def test_a_file_may_have_any_name_and_none_is_made_beside_it(tmp_path: Path, name: str) -> None:
    with sqlite3.connect(tmp_path / name) as store:
        store.execute("create table t (x text)")
        store.execute("insert into t values ('here')")
    assert list(load_rows(f"sqlite:///{tmp_path / name}", "t")) == [{"x": "here"}]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_decimals_are_numbers_and_a_table_without_a_key_keeps_its_order(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "n.db") as store:
        store.execute("create table t (n numeric(20, 10))")
        store.execute("create index backwards on t (n desc)")
        store.executemany("insert into t values (?)", [(72,), (0.5,), (90,)])
    rows = [row["n"] for row in load_rows(f"sqlite:///{tmp_path / 'n.db'}", "t")]
    assert list(map(repr, rows)) == ["72", "0.5", "90"]

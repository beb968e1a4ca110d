"""Rows of data sets in every form that users hold them in, and what is said of a wrong one."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from trireme.data.rows import NoRows, load_rows
from trireme.registry import SOURCES

TRAIN = [{"question": f"{n} + {n}?", "answer": f"#### {2 * n}"} for n in range(6)]
TEST = TRAIN[:2]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


HEADER = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# GSM8K
"""


def test_rows_with_an_empty_text_are_found_in_tables_and_in_parts_of_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"a": text, "b": 1} for text in ("x", " ", None, "")])
    assert load_rows(str(path)).blank("a") == [1, 3]
    assert load_rows(str(path), split="train[1:]").blank("a") == [0, 2]
    assert load_rows(str(path)).blank("b") == []


@pytest.mark.parametrize("header", [True, False])
def test_a_folder_in_the_hub_layout_with_and_without_a_header(tmp_path: Path, header: bool) -> None:
    write_parquet(tmp_path / "main" / "train-00000-of-00001.parquet", TRAIN)
    write_parquet(tmp_path / "main" / "test-00000-of-00001.parquet", TEST)
    write_parquet(tmp_path / "socratic" / "train-00000-of-00001.parquet", TRAIN[:1])
    # what one mirror's download has beside the data: it must not matter
    (tmp_path / "dataset_infos.json").write_text('{"main": {"features": {"question": {}}}}')
    if header:
        (tmp_path / "README.md").write_text(HEADER)
    assert list(load_rows(tmp_path, "main", "train")) == TRAIN
    assert list(load_rows(tmp_path, "main", "test")) == TEST
    assert len(load_rows(tmp_path, "socratic", "train")) == 1


def test_one_of_several_subsets_has_to_be_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "main" / "train-1.jsonl", TRAIN)
    write_jsonl(tmp_path / "socratic" / "train-1.jsonl", TRAIN)
    (tmp_path / "README.md").write_text(HEADER)
    with pytest.raises(ValueError, match="has several subsets: name one as subset_name"):
        load_rows(tmp_path)


def test_rows_that_are_in_use_are_read_once_while_their_file_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, TRAIN)
    rows = load_rows(path)
    assert load_rows(path) is rows
    assert load_rows(path, split="train[:2]") is not rows
    write_jsonl(path, TEST)
    assert list(load_rows(path)) == TEST
    assert list(rows) == TRAIN


def test_a_folder_of_json_lines_by_subset_and_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "main" / "train.jsonl", TRAIN)
    write_jsonl(tmp_path / "main" / "test.jsonl", TEST)
    rows = load_rows(tmp_path, "main", "train")
    assert rows.columns == ("question", "answer")
    assert list(rows) == TRAIN
    assert len(load_rows(tmp_path, "main", "test")) == 2


def test_compressed_files_of_a_folder_are_not_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "more.jsonl.gz").write_bytes(b"")
    (tmp_path / "pictures.zip").write_bytes(b"")  # no rows
    with pytest.raises(ValueError, match=r"no data files .*; more.jsonl.gz is compressed: exp"):
        load_rows(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", TRAIN)
    (tmp_path / "rows.jsonl.gz").write_bytes(b"")  # the same rows, which are read
    for _ in range(2):
        assert list(load_rows(tmp_path)) == TRAIN
    [said] = [record.getMessage() for record in caplog.records]
    assert said.endswith("more.jsonl.gz is passed over, as compressed: unpack what is to be read")


def test_a_prepared_folder_with_a_list_of_its_splits(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"game_file": "/a.tw-pddl", "target": ""}])
    (tmp_path / "dataset_dict.json").write_text('{"splits": {"name": "train", "num_examples": 1}}')
    assert load_rows(tmp_path, None, "train")[0]["game_file"] == "/a.tw-pddl"


def test_a_saved_data_set(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    test = Dataset.from_list(TEST)
    DatasetDict([("train", Dataset.from_list(TRAIN)), ("test", test)]).save_to_disk(
        tmp_path / "all"
    )
    test.save_to_disk(tmp_path / "one")
    assert list(load_rows(tmp_path / "all", None, "train")) == TRAIN
    assert list(load_rows(tmp_path / "one")) == TEST


def cut(share: float, name: str = "data-00000-of-00001.arrow") -> Any:
    def damage(folder: Path) -> None:
        os.truncate(folder / name, round((folder / name).stat().st_size * share))

    return damage


def cut_between_batches(folder: Path) -> None:
    import pyarrow

    path = folder / "data-00000-of-00001.arrow"
    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
        stream.read_next_batch()
        end = source.tell()
    os.truncate(path, end)


def overwrite(folder: Path) -> None:
    path = folder / "data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:200] + b"\xff" * 100 + path.read_bytes()[300:])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut(0.5), r"has a broken file: \S+/data-00000-of-00001.arrow: its end is missing"),
        (cut(0), r"has a broken file: \S+/data-00000-of-00001.arrow: its end is missing"),
        (cut_between_batches, r"has a broken file: \S+of-00001.arrow: its end is missing"),
        (overwrite, r"has a broken file: \S+/data-00000-of-00001.arrow: \w"),
        (cut(0.5, "state.json"), r"has a broken file: \S+/state.json is not JSON: "),
        (cut(0, "dataset_info.json"), r"has a broken file: \S+/dataset_info.json is not JSON: "),
        (lambda f: (f / "state.json").write_text("{}"), ".*state.json: it names no data files"),
        (
            lambda f: (f / "state.json").unlink(),
            "lacks the file .*state.json, .* not copied, whole",
        ),
        (lambda f: (f / "dataset_info.json").unlink(), "lacks the file .*dataset_info.json, which"),
        (
            lambda f: (f / "data-00000-of-00001.arrow").unlink(),
            "lacks the file .*/data-00000-of-00001.arrow, which save_to_disk writes",
        ),
    ],
)
def test_a_saved_data_set_that_is_not_whole_is_named_with_the_file(
    tmp_path: Path, damage: Any, said: str
) -> None:
    """Cut between two batches, it would have a part of its rows."""
    from datasets import Dataset

    Dataset.from_list([{"question": f"{i}?"} for i in range(2500)]).save_to_disk(tmp_path / "one")
    damage(tmp_path / "one")
    with pytest.raises(NoRows, match=f"dataset '{tmp_path}/one' {said}"):
        load_rows(tmp_path / "one")


def test_a_saved_data_set_without_the_split_names_those_it_has(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    both: Any = {"train": Dataset.from_list(TRAIN), "test": Dataset.from_list(TEST)}
    DatasetDict(both).save_to_disk(tmp_path)
    with pytest.raises(NoRows, match="has no split 'held_out'; it has: test, train"):
        load_rows(tmp_path, None, "held_out")


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_a_single_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        write_jsonl(path, TRAIN)
    elif kind == "json":
        path.write_text(json.dumps(TRAIN))
    elif kind == "csv":
        lines = ["question,answer", *(f"{r['question']},{r['answer']}" for r in TRAIN)]
        path.write_text("\n".join(lines))
    else:
        write_parquet(path, TRAIN)
    assert list(load_rows(path)) == TRAIN


def test_a_slice_of_a_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", TRAIN)
    path = tmp_path / "rows.jsonl"
    assert list(load_rows(path, split="train[:2]")) == TRAIN[:2]
    assert list(load_rows(path, split="train[50%:]")) == TRAIN[3:]
    assert list(load_rows(path, split="train[1:3]")) == TRAIN[1:3]


def test_a_file_is_one_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any name was accepted, and all rows were read."""
    path = tmp_path / "hard-ones" / "sums-held_out_test.jsonl"
    write_jsonl(path, TEST)
    own = "train", "all", "test", "test[:1]", "held", "held_out", "hard", "sums-held_out_test"
    for split in own:
        assert list(load_rows(path, split=split)) == TEST[: 1 if "[" in split else None]
    assert not caplog.records
    for wrong, near in (("tset", "; did you mean 'test'"), ("trian[:2]", "; did you mean 'train'")):
        name = wrong.partition("[")[0]
        with pytest.raises(NoRows, match=rf"has no split '{name}'{near}\? A file is one split"):
            load_rows(path, split=wrong)
    for _ in range(2):
        assert list(load_rows(path, split="validation")) == TEST
    (record,) = caplog.records
    assert "are read as split 'validation'" in record.getMessage()


def test_a_json_lines_file_needs_no_datasets_library(tmp_path: Path) -> None:
    import subprocess
    import sys

    write_jsonl(tmp_path / "rows.jsonl", TRAIN)
    code = (
        "import sys; from trireme.data.rows import load_rows; load_rows(sys.argv[1]);"
        "assert 'datasets' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "rows.jsonl")], check=True)


def test_a_missing_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dataset '.*/no/where' is not a file or folder here"):
        load_rows(tmp_path / "no" / "where")


def test_a_data_set_that_the_hub_does_not_give_is_named() -> None:
    with pytest.raises(ValueError, match="'trireme-tests/none' is neither a file or folder here"):
        load_rows("trireme-tests/none")


def test_a_broken_line_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1"}\n\n{"question": \n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: Expecting value \(column 14\)"):
        load_rows(path)
    path.write_text('{"question": "1"}\n[1, 2]\n')
    with pytest.raises(ValueError, match=r"line 2: expected an object, got \[1, 2\]; a list of"):
        load_rows(path)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('{"a": {"b": "1", "b": "2"}}', r"'b' more than once: with '1' and '2'"),
        ('{"a": ' + "1" * 5000 + "}", "it has a whole number of more than 4300 digits"),
    ],
)
def test_json_whose_value_is_not_known_is_refused(tmp_path: Path, entry: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{entry}\n')
    with pytest.raises(ValueError, match=f"rows.jsonl, line 2: .*{said}$"):
        load_rows(path)
    assert len(load_rows(path, on_error="skip")) == 1
    listed = tmp_path / "rows.json"
    listed.write_text(f"[{entry}]")
    with pytest.raises(ValueError, match=f"rows.json: .*{said}$"):
        load_rows(listed)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_json_over_several_lines_says_what_is_expected(tmp_path: Path, on_error: Any) -> None:
    for name, value in (("a.json", {"data": TRAIN}), ("b.json", TRAIN[0]), ("c.jsonl", TRAIN)):
        path = tmp_path / name
        path.write_text(json.dumps(value, indent=2))
        whole = "one list" if name == "c.jsonl" else "one object"
        says = f"that is {whole} over several lines: {path}: expected one object a line, or"
        with pytest.raises(ValueError, match=says):
            load_rows(path, on_error=on_error)
    for row in ('[{"a": "\\ud83d"}, {}]', '{"a": "\\ud83d"}', '{"a": 1, "a": 2}'):  # on one line
        path.write_text(row)
        with pytest.raises(ValueError, match=r"has a line that is not|has half of a"):
            load_rows(path)


def test_a_table_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet

    table = pyarrow.table([["a"], ["b"], ["c"]], names=["prompt", "answer", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("prompt,answer,prompt\na,b,c\n")
    for name in ("rows.parquet", "rows.csv"):
        with pytest.raises(ValueError, match=f"{name}: it has the column 'prompt' 2 times$"):
            load_rows(tmp_path / name)


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"broken file: .*rows\.parquet: "):
        load_rows(tmp_path / "rows.parquet")


def test_of_several_tables_the_one_that_is_broken_or_other_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-a.parquet", TRAIN)
    write_parquet(tmp_path / "train-b.parquet", [{"question": "1", "response": 2}])
    other = r"other columns: .*train-b\.parquet: question \(string\), response \(int64\); .*-a"
    with pytest.raises(ValueError, match=other):
        load_rows(tmp_path)
    (tmp_path / "train-b.parquet").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"broken file: .*train-b\.parquet"):
        load_rows(tmp_path)


def write_arrow(path: Path, rows: list[dict]) -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)


def write_csv(path: Path, rows: list[dict]) -> None:
    lines = [",".join(rows[0]), *(",".join(value or "" for value in row.values()) for row in rows)]
    path.write_text("\n".join(lines))


def need_answer(row: dict) -> None:
    if not row["answer"]:
        raise ValueError("column 'answer' is empty")


WRITERS = [("jsonl", write_jsonl), ("parquet", write_parquet)]
WRITERS += [("arrow", write_arrow), ("csv", write_csv)]


@pytest.mark.parametrize(("kind", "write"), WRITERS)
def test_a_malformed_row_of_several_files_is_named_with_its_own(
    tmp_path: Path, kind: str, write: Any
) -> None:
    write(tmp_path / f"train-a.{kind}", TRAIN)
    write(tmp_path / f"train-b.{kind}", [TRAIN[0], {"question": "1", "answer": None}])
    rows = load_rows(tmp_path)
    first, place = ("line 1", "line 2") if kind == "jsonl" else ("row 0", "row 1")
    told = rf"row 7 \(.*train-b\.{kind}, {place}\): column 'answer' is empty"
    with pytest.raises(ValueError, match=told):
        rows.checked(need_answer, "fail")
    kept = rows.checked(need_answer, "skip")
    assert (len(kept), kept.skipped) == (7, 1)
    assert kept.where(6).endswith(f"train-b.{kind}, {first})")


def test_files_of_several_kinds_keep_their_places(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-a.parquet", TRAIN)
    write_jsonl(tmp_path / "train-b.jsonl", TRAIN)
    rows = load_rows(tmp_path)
    assert rows.where(5).endswith("train-a.parquet, row 5)")
    assert rows.where(6).endswith("train-b.jsonl, line 1)")


def test_a_row_of_a_saved_data_set_is_named_with_its_shard(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(TRAIN).save_to_disk(tmp_path, num_shards=2)
    where = load_rows(tmp_path).where(4)
    assert where.endswith("data-00001-of-00002.arrow, row 1)")


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"has no rows in split 'train'"):
        load_rows(tmp_path / "train.jsonl")


def test_a_missing_split_or_subset_names_those_there_are(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "main" / "train-0.jsonl", TRAIN)
    write_jsonl(tmp_path / "main" / "test-0.jsonl", TEST)
    with pytest.raises(ValueError, match=r"no split 'held_out'; it has: test, train"):
        load_rows(tmp_path, "main", "held_out")
    (tmp_path / "README.md").write_text(HEADER)
    with pytest.raises(ValueError, match=r"no subset 'mian'; did you mean 'main'"):
        load_rows(tmp_path, "mian", "train")


def test_a_missing_column_names_those_there_are(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", TRAIN)
    rows = load_rows(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"no column 'prompt' .*It has: question, answer"):
        rows.require("prompt", "format.prompt_key")
    with pytest.raises(ValueError, match="did you mean 'question'"):
        rows.require("questions", "format.prompt_key")


HALF = '{"question": "1 + 1?", "more": [{"tag": "cut \\ud83d"}]}'


@pytest.mark.parametrize("kind", ["jsonl", "json", *["raw_task"] * ("sql" in SOURCES)])
def test_half_of_a_surrogate_pair_is_named_with_its_file_line_and_column(
    kind: str, tmp_path: Path
) -> None:
    whole, where = '{"question": "\\ud83d\\ude00?"}', "line 3"
    path, asked = tmp_path / "data.jsonl", None
    if kind == "json":
        path, where = tmp_path / "data.json", "entry 2"
        path.write_text(f"[{whole}, {HALF}]")
    elif kind == "raw_task":
        with closing(sqlite3.connect(tmp_path / "d.db")) as database, database:
            database.execute("CREATE TABLE tasks (raw_task TEXT)")
            database.executemany("INSERT INTO tasks VALUES (?)", [[whole], [HALF]])
        asked, where = f"sqlite:///{tmp_path / 'd.db'}", "row 1"
    else:
        path.write_text(f"{whole}\n\n{HALF}\n")
    named = asked or str(path)
    with pytest.raises(ValueError) as raised:
        load_rows(named)
    said = str(raised.value)
    assert said.startswith(f"dataset '{named}' has half of a surrogate pair: ")
    assert said.endswith(f"{where}, column 'more': expected whole characters, got "
                         '[{"tag": "cut \\ud83d"}]')  # fmt: skip
    if kind != "raw_task":
        assert [row["question"] for row in load_rows(named, on_error="skip")] == ["\U0001f600?"]


def test_a_nul_in_a_row_is_a_character_like_others(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "a\\u0000b"}\n')
    assert load_rows(path)[0] == {"question": "a\0b"}


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"rows.jsonl' is a pipe or a device, and rows are read"):
        load_rows(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("row", ["a,b,c", "a,b,"])
def test_a_csv_whose_rows_are_longer_than_its_names_is_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "rows.csv").write_text(f"question,answer\n\n{row}\n")
    said = r"rows.csv: line 3 has 3 values: expected 2, since the first line names question, answer"
    with pytest.raises(ValueError, match=said):
        load_rows(tmp_path / "rows.csv")


def test_a_parquet_file_without_rows_is_left_out_of_a_folder_and_alone_refused(
    tmp_path: Path,
) -> None:
    import pyarrow.parquet

    write_parquet(tmp_path / "train-b.parquet", TRAIN)
    empty = pyarrow.Table.from_pylist(TRAIN).slice(0, 0)
    for name in ("train-a", "train-c"):
        pyarrow.parquet.write_table(empty, tmp_path / f"{name}.parquet")
    rows = load_rows(tmp_path)
    assert list(rows) == TRAIN and rows.where(0).endswith("train-b.parquet, row 0)")
    with pytest.raises(ValueError, match=r"broken file: .*train-a\.parquet: it has no rows"):
        load_rows(tmp_path / "train-a.parquet")

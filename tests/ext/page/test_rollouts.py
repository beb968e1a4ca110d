"""The index of rollouts: filters against a plain loop, files that grow and are replaced."""

from __future__ import annotations

import io
import json
import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.buffer.made import experience
from tests.ext.page.made import make_run
from trireme.buffer.record import Record
from trireme.experience import EID
from trireme.ext.page import search
from trireme.ext.page.rollouts import Filter, RolloutIndex, Selection, export, question_of


@pytest.fixture
def rollouts(tmp_path: Path) -> RolloutIndex:
    made = RolloutIndex(make_run(tmp_path / "run"))
    made.refresh()
    return made


@pytest.mark.parametrize(
    ("wanted", "holds"),
    [
        (Filter(kind="train"), lambda r: r["kind"] == "train"),
        (Filter(kind="eval", step=2), lambda r: r["kind"] == "eval" and r["step"] == 2),
        (Filter(least=0.5), lambda r: (r["reward"] or 0) >= 0.5),
        (Filter(most=0.5), lambda r: r["reward"] is not None and r["reward"] <= 0.5),
        (Filter(cut=True), lambda r: r.get("stop_reason") == "length"),
        (Filter(task="0:101"), lambda r: r["task"] == "0:101"),
        (Filter(group="2/1"), lambda r: r["group"] == "2/1"),
        (Filter(text="REPLY 2 OF"), lambda r: "Reply 2 of" in (r["response"] or "")),
        (Filter(text=".\nReply"), lambda r: ".\nReply" in (r["response"] or "")),
        (Filter(text="what is 1"), lambda r: "What is 1" in r["prompt"]),
        (Filter(text="task_index"), lambda r: False),
        (Filter(text="stop"), lambda r: False),
        (Filter(text="prompt"), lambda r: False),  # keys of the lines are no texts
        (Filter(text="response"), lambda r: False),
        (Filter(text="null"), lambda r: False),
        (Filter(text='", "'), lambda r: False),
        (Filter(text="n"), lambda r: "n" in (r["prompt"] + (r["response"] or "")).lower()),
        (Filter(text="re"), lambda r: "re" in (r["prompt"] + (r["response"] or "")).lower()),
    ],
)
def test_a_filter_finds_what_a_loop_over_all_lines_finds(
    rollouts: RolloutIndex, wanted: Filter, holds: Any
) -> None:
    everything = rollouts.rows(range(len(rollouts)))
    assert len(everything) == 3 * 8 + 3 * 2 + 1
    expected = {(row["kind"], row["eid"]) for row in everything if holds(row)}
    found = rollouts.rows(rollouts.select(wanted))
    assert {(row["kind"], row["eid"]) for row in found} == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize("order", ["newest", "oldest", "best", "worst", "longest", "random"])
def test_the_first_of_a_search_are_those_of_the_whole_one(tmp_path: Path, order: str) -> None:
    folder = make_run(tmp_path / "run")
    whole, quick, mixed = (RolloutIndex(folder) for _ in range(3))
    for index in (whole, quick, mixed):
        index.refresh()
    wanted = Filter(text="reply 2", order=order, kind="train")
    expected = whole.select(wanted).tolist()
    assert len(expected) == 6
    for count in (1, 3, 6):
        first = quick.leading(wanted, count)
        assert first is not None and first.tolist() == expected[:count]
    assert quick.leading(wanted, 7) is None, "there are six: only a whole search knows that"
    assert mixed.leading(wanted, 2) is not None
    assert mixed.select(wanted).tolist() == expected, "what was read of it before changes nothing"
    assert mixed.leading(Filter(order=order), 2) is None, "numbers alone are no search"


def test_a_search_is_remembered_and_only_new_lines_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run")
    index = RolloutIndex(folder)
    index.refresh()
    before = index.select(Filter(text="reply 2", kind="train"))
    read = []
    holds = search._Lines.holds
    monkeypatch.setattr(
        search._Lines, "holds", lambda lines, row: read.append(row) or holds(lines, row)
    )
    monkeypatch.setattr(search, "_lines_holding", lambda *_: pytest.fail("the file is read again"))
    monkeypatch.setattr(search, "FEW", 0.5)
    assert index.select(Filter(text="reply 2", kind="train")).tolist() == before.tolist()
    assert read == []
    lines = folder / "buffer/experience_buffer.jsonl"
    with lines.open("a") as file:
        file.write(lines.read_text().splitlines()[2].replace('"1/0/2/0"', '"9/0/2/0"') + "\n")
    index.refresh()
    after = index.select(Filter(text="reply 2", kind="train"))
    assert len(after) == len(before) + 1 and read == [len(index) - 1]


TEXTS = ["plain words", 'a "quoted" word', "two\nlines", "tab\there", "back\\slash n", "", "prompt",
         '", "response": "', "bell \x07 001b \x1b end", "Été n", "new",
         "ÇA ET LÀ", "Где кот?", "Ὀδυσσεύς", "ΟΔΟΣ\n", "Maß"]  # fmt: skip
NEEDLES = ["n", "r", "u", "001b", "00", "b", "t", '"', "\\", "\n", "words", "prompt", "response",
           "W", '", "', ": ", "resp", "1b end", "é", "s\\", "plain words", "here",
           "É", "ça", "ГДЕ", "к", "οδος\n", "ΣΕΎΣ", "SSÉ", "ß"]  # fmt: skip


def test_a_search_takes_no_key_and_no_escape_for_a_text(tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    buffer.mkdir()
    pairs = [(a, b) for a in TEXTS for b in [*TEXTS, None]]
    lines = [
        {"eid": f"1/{n}/0/0", "step": 1, "reward": 0.0, "prompt": a, "response": b,
         "prompt_length": 1, "stop_reason": "word"}
        for n, (a, b) in enumerate(pairs)
    ]  # fmt: skip
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (buffer / "experience_buffer.jsonl").write_text(text)
    found = RolloutIndex(tmp_path)
    found.refresh()
    for needle in NEEDLES:
        places = found.select(Filter(text=needle, order="oldest")).tolist()
        wanted = [
            n for n, (a, b) in enumerate(pairs)
            if needle.casefold() in a.casefold() or needle.casefold() in (b or "").casefold()
        ]  # fmt: skip
        assert places == wanted, needle


def test_orders(rollouts: RolloutIndex) -> None:
    def rewards(order: str) -> list[Any]:
        return [row["reward"] for row in rollouts.rows(rollouts.select(Filter(order=order)))]

    best, worst = rewards("best"), rewards("worst")
    assert best[-1] is None and best[:-1] == sorted(best[:-1], reverse=True)
    assert worst[-1] is None and worst[:-1] == sorted(worst[:-1])
    newest = [row["step"] for row in rollouts.rows(rollouts.select(Filter(order="newest")))]
    assert newest == sorted(newest, reverse=True)
    shuffled = rollouts.select(Filter(order="random", seed=3)).tolist()
    assert shuffled == rollouts.select(Filter(order="random", seed=3)).tolist()
    assert sorted(shuffled) == list(range(len(rollouts))) != shuffled
    with pytest.raises(ValueError, match="order 'biggest' is not known: one of newest"):
        Filter(order="biggest")


def test_the_same_held_out_task_through_the_steps(rollouts: RolloutIndex) -> None:
    rows = rollouts.rows(rollouts.select(Filter(kind="eval", task="held_out/1", order="oldest")))
    assert [row["eid"] for row in rows] == [f"{step}/held_out/1/0/0" for step in (1, 2, 3)]


def test_a_file_that_grows_is_read_on_and_one_that_is_replaced_anew(tmp_path: Path) -> None:
    lines = tmp_path / "buffer/experience_buffer.jsonl"
    record = Record(lines=lines)
    found = RolloutIndex(tmp_path)
    found.refresh()
    assert len(found) == 0
    record._write([experience(1, 0, 0, math.nan), experience(1, 0, 1, 1.0)])
    with lines.open("a") as file:
        file.write('{"eid": "half')
    found.refresh()
    assert len(found) == 2
    assert found.row("train", "1/0/0/0")["reward"] is None  # browsers know no NaN
    lines.write_text(lines.read_text().removesuffix('{"eid": "half'))
    record._write([experience(2, 0, 0, 0.5)])
    found.refresh()
    assert [row["eid"] for row in found.rows(found.select(Filter(order="oldest")))][-1] == "2/0/0/0"
    places = found.select(Filter(text="reply"))
    record._lines.keep(lambda line: line["step"] == 2)  # type: ignore[union-attr]
    found.refresh()
    assert [row["eid"] for row in found.rows(found.select(Filter()))] == ["2/0/0/0"]
    with pytest.raises(ValueError, match="was rewritten in the meantime: try again"):
        found.rows(places)
    with pytest.raises(ValueError, match="no rollout '1/0/1/0' of kind 'train'"):
        found.row("train", "1/0/1/0")
    record.close()


def test_a_run_with_a_database_alone(tmp_path: Path) -> None:
    record = Record(database=f"sqlite:///{tmp_path}/buffer/explorer_output.db")
    record._write([experience(1, 0, run, float(run)) for run in range(3)])
    record.close()
    found = RolloutIndex(tmp_path)
    found.refresh()
    best = found.rows(found.select(Filter(order="best", text="reply 2")))
    assert [(row["eid"], row["reward"]) for row in best] == [("1/0/2/0", 2.0)]
    assert not len(found.select(Filter(text="reply_2"))), "no letter stands for another"


@pytest.mark.parametrize("name", ["1", "b", "ünö"])
def test_each_task_of_a_named_explorer_is_a_group(tmp_path: Path, name: str) -> None:
    record = Record(database=f"sqlite:///{tmp_path}/buffer/explorer_output.db")
    made = [
        experience(3, task, run, 1.0, eid=EID(f"3/{name}", task, run))
        for task in range(2)
        for run in range(3)
    ]
    record._write([*made, experience(3, 0, 0, 1.0, eid=EID(3, 0, 0, 0, "copy1"))])
    record.close()
    rollouts = RolloutIndex(tmp_path)
    rollouts.refresh()
    count, groups = rollouts.groups(Filter(), 0, 10)
    found = {group["group"]: [one["run"] for one in group["rollouts"]] for group in groups}
    assert count == 3
    assert found == {f"3/{name}/0": [0, 1, 2], f"3/{name}/1": [0, 1, 2], "3/0": [0]}


def test_a_search_of_a_database_knows_the_case_of_all_letters(tmp_path: Path) -> None:
    record = Record(database=f"sqlite:///{tmp_path}/buffer/explorer_output.db")
    said = ["Été", "été", "kot", None]
    record._write([experience(1, 0, run, 0.0, response_text=text) for run, text in enumerate(said)])
    record.close()
    found = RolloutIndex(tmp_path)
    found.refresh()
    rows = found.rows(found.select(Filter(order="oldest", text="ÉTÉ")))
    assert sorted(row["response"] for row in rows) == ["Été", "été"]


def test_a_database_that_was_cut_or_rewound_is_read_anew(tmp_path: Path) -> None:
    record = Record(database=f"sqlite:///{tmp_path}/buffer/explorer_output.db")
    record._write([experience(1, 0, run, float(run)) for run in range(3)])
    found = RolloutIndex(tmp_path)

    def rewards() -> dict[str, Any]:
        found.refresh()
        return {row["eid"]: row["reward"] for row in found.rows(found.select(Filter()))}

    assert rewards() == {"1/0/0/0": 0.0, "1/0/1/0": 1.0, "1/0/2/0": 2.0}
    path = tmp_path / "buffer/explorer_output.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM experiences WHERE msg_id = '1/0/2/0'")
        database.commit()
    record._write([experience(1, 0, 2, 7.0)])  # a resume tries it again: the key is used again
    assert rewards() == {"1/0/0/0": 0.0, "1/0/1/0": 1.0, "1/0/2/0": 7.0}
    record._write([experience(1, 0, 3, 3.0)])
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM experiences WHERE msg_id = '1/0/0/0'")  # the copy's limit
        database.commit()
    assert rewards() == {"1/0/1/0": 1.0, "1/0/2/0": 7.0, "1/0/3/0": 3.0}
    record.close()


def test_a_selection_is_exported_whole(rollouts: RolloutIndex) -> None:
    places = rollouts.select(Filter(kind="train", least=1.0))
    rows = [json.loads(line) for line in b"".join(export(rollouts, places, "jsonl")).splitlines()]
    assert rows == rollouts.rows(places) and len(rows) == 12
    table = as_table(rollouts, places)
    assert table.column("eid").to_pylist() == [row["eid"] for row in rows]
    assert json.loads(table.column("info")[0].as_py()) == rows[0]["info"]


def test_evaluations_and_failures_are_exported_as_parquet(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    record = Record(lines=run / "buffer/evaluation.jsonl", messages=True)
    parts = [{"type": "text", "text": "in parts"}]
    other = experience(3, 5, 0, 1.0, messages=[{"role": "user", "content": parts}], tools=[{}])
    other.eid = EID("3/held_out", 5, 0)
    record._write([other])
    record.close()
    rollouts = RolloutIndex(run)
    rollouts.refresh()
    for kind, count in (("eval", 7), ("failed", 1)):
        places = rollouts.select(Filter(kind=kind))
        table, rows = as_table(rollouts, places), rollouts.rows(places)
        assert table.num_rows == len(rows) == count
        key = "messages" if kind == "eval" else "failure"
        texts = table.column(key).to_pylist()
        assert [text and json.loads(text) for text in texts] == [row.get(key) for row in rows]


def as_table(rollouts: RolloutIndex, places: Selection) -> pyarrow.Table:
    return pyarrow.parquet.read_table(io.BytesIO(b"".join(export(rollouts, places, "parquet"))))


def test_groups_have_their_question_and_the_rewards_of_all_their_rollouts(
    rollouts: RolloutIndex,
) -> None:
    total, groups = rollouts.groups(Filter(kind="train", text="reply 2"), 0, 4)
    assert total == 6 and [group["group"] for group in groups] == ["3/1", "3/0", "2/1", "2/0"]
    first = groups[0]
    assert (first["question"], first["step"], first["mean"]) == ("What is 1 + 3?", 3, 0.5)
    assert [one["reward"] for one in first["rollouts"]] == [0.0, 1.0, 0.0, 1.0]
    assert [one["eid"] for one in first["rollouts"]] == [f"3/1/{run}/0" for run in range(4)]
    assert rollouts.groups(Filter(kind="train"), 4, 4)[1][1]["group"] == "1/0"
    total, (failed,) = rollouts.groups(Filter(kind="failed"), 0, 4)
    assert total == 1 and failed["mean"] is None  # its group is that of rollouts of kind train


def test_groups_that_disagree_and_the_best_by_mean_reward(tmp_path: Path) -> None:
    record = Record(lines=tmp_path / "buffer/experience_buffer.jsonl")
    for task, rewards in enumerate([(1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (None, 1.0), (0.2, 0.9)]):
        record._write([experience(1, task, run, reward) for run, reward in enumerate(rewards)])
    record.close()
    index = RolloutIndex(tmp_path)
    index.refresh()
    found = index.rows(index.select(Filter(disagree=True, order="oldest")))
    assert [row["group"] for row in found] == ["1/2", "1/2", "1/4", "1/4"]
    best = [group["group"] for group in index.groups(Filter(kind="train", order="best"), 0, 9)[1]]
    assert best[:2] == ["1/3", "1/0"] or best[:2] == ["1/0", "1/3"]
    assert best[2:] == ["1/4", "1/2", "1/1"]
    assert index.facts()["train"]["groups"] == 5 and index.facts()["train"]["rewards"] == [0, 1]


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"prompt": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n"
                    "<|im_start|>assistant\n"}, "1 + 1?"),
        ({"prompt": "<|user|>1 + 1?<|end|><|assistant|>"}, "1 + 1?"),
        ({"prompt": "[INST] 1 + 1? [/INST]"}, "1 + 1?"),
        ({"prompt": "plain text"}, "plain text"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "1 + 1?"}]}, "1 + 1?"),
        ({"prompt": None}, ""),
    ],
)  # fmt: skip
def test_the_title_of_a_rollout_is_its_question(row: dict[str, Any], question: str) -> None:
    assert question_of(row) == question

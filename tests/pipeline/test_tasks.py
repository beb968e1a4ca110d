"""The task pipeline: rows through users' operators once, the same again after a restart."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import wait_for
from tests.limits import HANG_S
from trireme.data.rows import Rows
from trireme.pipeline.operators import OperatorFailed
from trireme.pipeline.tasks import prepared
from trireme.registry import TASK_OPERATORS

CALLS: list[int] = []


def hard_first(rows: list[dict[str, Any]], *, least: int = 0) -> list[dict[str, Any]]:
    CALLS.append(len(rows))
    return sorted((r for r in rows if r["level"] >= least), key=lambda r: -r["level"])


class Prefix:
    def __init__(self, text: str) -> None:
        self.text = text

    def process(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"prompt": f"{self.text}{row['level']}"} for row in rows]


def no_rows(rows: list[dict[str, Any]]) -> Any:
    return "nothing"


def levels(*found: int) -> Rows:
    return Rows("dataset 'x'", [{"level": level} for level in found], ["level"])


HERE = __name__
STEPS = [(f"{HERE}:hard_first", {"least": 2}), (f"{HERE}:Prefix", {"text": "Level "})]


def test_rows_go_through_the_operators_in_order_and_once(tmp_path: Path) -> None:
    CALLS.clear()
    tmp_path /= "job/tasks"  # neither is there
    for _ in range(2):  # a restart finds the rows as they were
        rows = prepared(levels(1, 2, 3), STEPS, tmp_path, "sums")
        assert [row["prompt"] for row in rows] == ["Level 3", "Level 2"]
        assert set(rows.columns) == {"level", "prompt"}
    assert CALLS == [3]
    assert len(list(tmp_path.glob("sums-*.jsonl"))) == 1
    prepared(levels(1, 2, 3), STEPS[:1], tmp_path, "sums")  # other operators: made anew
    assert CALLS == [3, 3]


def test_rows_are_made_anew_when_the_data_or_an_operator_s_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if row["level"] > 2]

    def corrected(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if row["level"] < 2]

    def levels_of(*found: int) -> list[int]:
        rows = prepared(levels(*found), [("chosen", {})], tmp_path, "sums")
        return [row["level"] for row in rows]

    monkeypatch.setitem(TASK_OPERATORS._registered, "chosen", chosen)
    assert levels_of(1, 2, 3) == [3]
    assert levels_of(1, 5, 3) == [5, 3]
    monkeypatch.setitem(TASK_OPERATORS._registered, "chosen", corrected)
    assert levels_of(1, 5, 3) == [1]


def test_an_operator_that_leaves_nothing_or_no_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dataset 'x': .* left none of its 2 rows"):
        prepared(levels(1, 1), STEPS, tmp_path, "sums")
    with pytest.raises(OperatorFailed, match=r"no_rows' returned str: expected a list of rows"):
        prepared(levels(1), [(f"{HERE}:no_rows", {})], tmp_path, "sums")
    with pytest.raises(ValueError, match=r"operators\[0\] .*Prefix' needs the option 'text'"):
        prepared(levels(1), [(f"{HERE}:Prefix", {})], tmp_path, "sums")


def test_explorers_that_begin_together_make_the_rows_once_and_find_all_of_them(
    tmp_path: Path,
) -> None:
    CALLS.clear()
    rows, ready = levels(*range(2000)), threading.Barrier(8)

    def begins(_: int) -> int:
        ready.wait(HANG_S)
        return len(prepared(rows, STEPS, tmp_path, "sums"))

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(begins, range(8))) == {1998}
    assert CALLS == [2000]


GO_ON = threading.Event()


def stays(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert GO_ON.wait(HANG_S)
    return rows


def test_an_explorer_that_waits_for_another_to_make_the_tasks_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    GO_ON.clear()

    def begins(_: int) -> int:
        return len(prepared(levels(1, 2), [(f"{HERE}:stays", {})], tmp_path, "slow"))

    with ThreadPoolExecutor(2) as pool:
        found = pool.map(begins, range(2))
        wait_for(lambda: "waiting for another explorer, which makes the tasks" in caplog.text)
        GO_ON.set()
        assert list(found) == [2, 2]
    assert caplog.text.count("waiting for another explorer") == 1

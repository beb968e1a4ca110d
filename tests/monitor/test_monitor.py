"""Metrics go where they should, whole."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from trireme.monitor import monitor as monitor_file
from trireme.monitor.events import Ended, Evaluated
from trireme.monitor.monitor import JsonLinesMonitor, read_metrics


def test_a_line_a_step_and_part(tmp_path: Path) -> None:
    monitor = JsonLinesMonitor(tmp_path)
    monitor.log({"rollout/reward/mean": 0.5}, 1, "explorer")
    monitor.log({"actor/pg_loss": -0.1}, 1, "trainer")
    rows = [json.loads(line) for line in monitor.path.read_text().splitlines()]
    assert [(row["part"], row["step"]) for row in rows] == [("explorer", 1), ("trainer", 1)]
    assert rows[0]["metrics"] == {"rollout/reward/mean": 0.5}


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    monitor = JsonLinesMonitor(tmp_path)
    monitor.log({"a": math.nan, "b": math.inf, "c": 1}, 1, "trainer")
    assert read_metrics(monitor.path)[0]["metrics"] == {"a": None, "b": None, "c": 1.0}


def test_half_a_line_of_a_killed_process_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"part": "trainer", "step": 1, "metrics": {}}\n{"part": "tra')
    monitor = JsonLinesMonitor(tmp_path)
    monitor.log({"x": 2.0}, 2, "trainer")
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def steps_in(folder: Path) -> list[tuple[str, int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["part"], row["step"], row["metrics"]["x"]) for row in rows]


def test_a_step_that_comes_again_replaces_its_line(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        monitor = JsonLinesMonitor(tmp_path)
        monitor.log({"x": value}, 5, "trainer")
        monitor.log({"x": value + 2}, 5, "trainer")
    assert steps_in(tmp_path) == [("trainer", 5, 4.0)]


@pytest.mark.parametrize("part", ["eval", "bench"])
def test_evaluations_of_one_step_have_one_line_with_all_their_tasksets(
    tmp_path: Path, part: str
) -> None:
    monitor = JsonLinesMonitor(tmp_path)
    for name, value in (("one", 0.1), ("two", 0.2)):
        monitor.log({f"{part}/{name}/accuracy/mean@1": value}, 4, part)
    again = JsonLinesMonitor(tmp_path)
    again.log({f"{part}/one/accuracy/mean@1": 0.3}, 4, part)  # the last evaluation of a run
    again.hear(Ended())
    [row] = [json.loads(line) for line in again.path.read_text().splitlines()]
    assert (row["part"], row["step"]) == (part, 4)
    assert row["metrics"] == {
        f"{part}/one/accuracy/mean@1": 0.3,
        f"{part}/two/accuracy/mean@1": 0.2,
    }


def test_two_processes_share_the_file_while_one_cuts_its_part(tmp_path: Path) -> None:
    explorer, trainer = JsonLinesMonitor(tmp_path), JsonLinesMonitor(tmp_path)
    explorer.log({"x": 1.0}, 1, "explorer")
    trainer.log({"x": 1.0}, 1, "trainer")
    again = JsonLinesMonitor(tmp_path)
    again.keep_until({"trainer": 0})
    explorer.log({"x": 1.0}, 2, "explorer")
    assert steps_in(tmp_path) == [("explorer", 1, 1.0), ("explorer", 2, 1.0)]


def test_an_evaluation_of_several_tasksets_reads_no_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of thousands of steps would read and write megabytes at each of them."""
    monitor, times_read, read = JsonLinesMonitor(tmp_path), [], monitor_file.jsonl_rows
    monkeypatch.setattr(
        monitor_file, "jsonl_rows", lambda *a, **k: times_read.append(a) or read(*a, **k)
    )
    for step in range(1, 6):
        for name in ("one", "two", "three"):
            monitor.hear(Evaluated("eval", step, {f"eval/{name}/reward/mean@1": float(step)}))
    assert times_read == []
    names = {f"eval/{name}/reward/mean@1" for name in ("one", "two", "three")}
    assert [(row["step"], set(row["metrics"])) for row in read_metrics(monitor.path)] == [
        (step, names) for step in range(1, 6)
    ]


def test_lines_of_an_unfinished_evaluation_go_when_a_run_that_was_killed_is_resumed(
    tmp_path: Path,
) -> None:
    killed = JsonLinesMonitor(tmp_path)
    for name in ("one", "two"):
        killed.log({f"eval/{name}/x": 0.5}, 3, "eval")
    JsonLinesMonitor(tmp_path)
    [row] = [json.loads(line) for line in killed.path.read_text().splitlines()]
    assert row["metrics"] == {"eval/one/x": 0.5, "eval/two/x": 0.5}

"""The runs below a folder, and what each says about itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.ext.page.made import make_run
from trireme.ext.page import runs
from trireme.ext.page.runs import MOST_POINTS, Curves, _Part, about, find_runs
from trireme.ext.page.table import Entries
from trireme.monitor.monitor import JsonLinesMonitor


def test_every_run_below_a_folder_is_found_and_nothing_else(tmp_path: Path) -> None:
    make_run(tmp_path / "project/one/sft", steps=1)
    make_run(tmp_path / "project/one/grpo", steps=1)
    (tmp_path / "project/other/buffer").mkdir(parents=True)
    assert {run.name for run in find_runs(tmp_path)} == {"project/one/sft", "project/one/grpo"}
    (own,) = find_runs(tmp_path / "project/one/grpo")
    assert own.name == "grpo"
    make_run(tmp_path / "of_run_yaml/run", steps=1)  # a run.yaml without a name
    assert "of_run_yaml/run" in {run.name for run in find_runs(tmp_path)}
    for folder in ("missing", "project/other"):
        with pytest.raises(ValueError, match=r"no folder|contains no run"):
            find_runs(tmp_path / folder)


def test_a_folder_that_cannot_be_read_hides_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "one", steps=1)
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuses(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuses)
    assert [run.name for run in find_runs(tmp_path)] == ["one"]


@pytest.mark.parametrize("line", [b"{damaged\n", b"[1]\n", b'{"step": 1}\n', b"\xff\xfe\n"])
def test_a_damaged_first_line_hides_no_run(tmp_path: Path, line: bytes) -> None:
    for name in ("whole", "damaged"):
        make_run(tmp_path / name, steps=1)
    metrics = tmp_path / "damaged/monitor/metrics.jsonl"
    metrics.write_bytes(line + metrics.read_bytes())
    found = find_runs(tmp_path)
    assert {run.name for run in found} == {"whole", "damaged"}
    assert [entry["step"] for entry in Entries().of(found)] == [1, 1]


def test_curves_are_columns_with_null_for_what_is_no_number(tmp_path: Path) -> None:
    (run,) = find_runs(make_run(tmp_path / "run"))
    curves = Curves()
    found = curves.of(run)
    assert found["explorer"]["steps"] == [1, 2, 3]
    assert found["explorer"]["metrics"]["rollout/reward/mean"] == [0.1, 0.2, 0.3]
    assert found["trainer"]["metrics"]["actor/kl_loss"] == [None] * 3
    assert curves.of(run) is found
    with (run.folder / "monitor/metrics.jsonl").open("a") as file:
        file.write('{"time": 1, "part": "explorer", "step": 4, "metrics": {"x": 1}}\n')
    assert curves.of(run)["explorer"]["steps"] == [1, 2, 3, 4]


def test_curves_are_read_on_and_read_anew_where_a_file_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    row_of = runs._row
    monkeypatch.setattr(runs, "_row", lambda line: parsed.append(line) or row_of(line))
    path = tmp_path / "monitor/metrics.jsonl"
    path.parent.mkdir()

    def lines(*steps: int, value: float = 0.5, time: float = 1.0) -> str:
        rows = [
            {"time": time, "part": "trainer", "step": n, "metrics": {"x": value}} for n in steps
        ]
        return "".join(json.dumps(row) + "\n" for row in rows)

    path.write_text(lines(1, 2, 3))
    (run,) = find_runs(tmp_path)
    curves = Curves()
    assert curves.of(run)["trainer"]["steps"] == [1, 2, 3]
    with path.open("a") as file:
        file.write(lines(4) + "{damaged\n" + lines(5)[:-9])
    parsed.clear()
    assert curves.of(run)["trainer"]["steps"] == [1, 2, 3, 4] and len(parsed) == 2
    with path.open("a") as file:
        file.write(lines(5)[-9:] + lines(4, value=1 / 3))  # a resume logs a step again
    assert curves.of(run)["trainer"] == Curves().of(run)["trainer"]
    assert curves.of(run)["trainer"]["metrics"]["x"] == [0.5, 0.5, 0.5, 0.333333, 0.5]
    path.write_text(lines(*range(1, 20), value=0.7, time=2.0))  # the same inode, and longer
    assert curves.of(run)["trainer"]["metrics"]["x"] == [0.7] * 19
    other = path.with_name("other")
    other.write_text(lines(*range(1, 20), value=0.9, time=2.0) + lines(20))  # the same beginning
    other.replace(path)
    assert curves.of(run)["trainer"]["metrics"]["x"] == [0.9] * 19 + [0.5]


def test_a_step_of_several_explorers_is_that_of_all(tmp_path: Path) -> None:
    def log(explorer: str, step: int, reward: float, runs: float = 4.0) -> None:
        metrics = {"rollout/reward/mean": reward, "rollout/reward/max": reward}
        metrics |= {"rollout/runs": runs, "rollout/failed/time": 1.0}
        JsonLinesMonitor(tmp_path / "monitor" / explorer).log(metrics, step, "explorer")

    log("", 1, 0.5)
    (run,) = find_runs(tmp_path)
    curves = Curves()
    assert curves.of(run)["explorer"]["metrics"]["rollout/reward/mean"] == [0.5]
    log("b", 1, 1.0, runs=6.0)
    log("b", 2, 0.25)
    log("", 1, 0.75)  # after a resume
    for read in (curves, Curves()):
        explorer = read.of(run)["explorer"]
        assert explorer["steps"] == [1, 2]
        metrics = explorer["metrics"]
        assert metrics["rollout/reward/mean"] == [0.875, 0.25]
        assert metrics["rollout/reward/max"] == [1.0, 0.25]
        assert metrics["rollout/runs"] == [10.0, 4.0]
        assert metrics["rollout/failed/time"] == [2.0, 1.0]


def test_a_step_that_comes_late_stands_in_its_place() -> None:
    part = _Part()
    for step, metrics in (
        (1, {"x": 1}),
        (4, {"x": 4, "y": 4}),
        (3, {"y": 3}),
        (5, {}),
        (3, {"z": 3}),
    ):
        part.add({"step": step, "time": float(step), "metrics": metrics})
    assert part.thinned() == {
        "steps": [1, 3, 4, 5],
        "times": [1.0, 3.0, 4.0, 5.0],
        "metrics": {"x": [1, None, 4, None], "y": [None, 3, 4, None], "z": [None, 3, None, None]},
    }


def test_long_curves_are_thinned_and_keep_their_last_step() -> None:
    part = _Part()
    for n in range(1, 9001):
        part.add({"step": n, "time": n, "metrics": {"x": n}})
    found = part.thinned()
    assert len(found["steps"]) <= MOST_POINTS and found["steps"][-1] == 9000
    assert found["metrics"]["x"] == found["steps"]


def test_a_run_says_what_it_was_and_what_changed_at_its_resume(tmp_path: Path) -> None:
    (run,) = find_runs(make_run(tmp_path / "run"))
    first, second = about(run)["starts"]
    assert first["changes"] == [] and "lr: 0.001" in first["config_text"]
    assert second["changes"] == [{"key": "algorithm.optimizer.lr", "old": 1e-3, "new": 1e-4}]
    told = Entries().entry(run)
    assert told["seed"] == 7 and not told["finished"]
    assert [one["cause"] for one in told["warnings"]] == ["all_equal"]


def test_a_run_of_one_stage_has_finished_until_a_resume_logs_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (found,) = find_runs(run)
    entries = Entries()
    assert not entries.entry(found)["finished"]
    summary, newest = run / "summary.json", max(f.stat().st_mtime for f in found.files)
    summary.write_text("{}")
    os.utime(summary, (newest + 1, newest + 1))
    assert entries.entry(found)["finished"]
    os.utime(found.metric_files[0], (newest + 2, newest + 2))
    assert not entries.entry(found)["finished"]

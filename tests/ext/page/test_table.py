"""The entries of runs: how each goes or ended, its figures, and what differs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ext.page.made import make_run
from tests.limits import HANG_S
from trireme.ext.page.listing import compare, list_runs, run_named
from trireme.ext.page.runs import about, compared, find_runs, write_note
from trireme.ext.page.table import SILENT_S, Entries, differing
from trireme.files import write_json
from trireme.monitor.monitor import JsonLinesMonitor
from trireme.processes import began

ERROR = "reward 'price' failed: KeyError: 'milk'\n  prices.py:8: return PRICES[item]"


def start(folder: Path, *, config: dict[str, Any] | None = None, **more: Any) -> Path:
    """The record of a run that this process has started."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    (folder / "run/start_1.yaml").write_text(yaml.safe_dump(config or {}))
    entry = {"mode": "both", "name": "", "time": datetime.now(UTC).isoformat(), "host":
             socket.gethostname(), "process": os.getpid(), "config_file": "start_1.yaml",
             "steps": {"by": "trainer", "total": 400}} | more  # fmt: skip
    (folder / "run/starts.json").write_text(json.dumps({"starts": [entry]}))
    return folder


def entry_of(folder: Path) -> dict[str, Any]:
    (run,) = find_runs(folder)
    return Entries().entry(run)


def ended(how: str, error: str = "") -> dict[str, Any]:
    return {"end": {"how": how, "error": error, "time": datetime.now(UTC).isoformat()}}


@pytest.mark.parametrize("how", ["finished", "stopped", "failed"])
def test_a_run_that_ended_before_its_first_step_is_listed_with_its_state(
    tmp_path: Path, how: str
) -> None:
    run = start(tmp_path / "run", **ended(how, ERROR if how == "failed" else ""))
    entry = entry_of(run)
    assert (entry["state"], entry["step"], entry["total"]) == (how, 0, 400)
    assert entry["error"] == (ERROR if how == "failed" else "") and entry["seconds"] < 60


def test_a_run_without_an_end_goes_on_or_was_killed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    states = {
        "running": start(tmp_path / "a"),
        "killed": start(tmp_path / "b", process=gone.pid),
        "unknown": start(tmp_path / "c", host="elsewhere"),
    }
    hour_ago = time.time() - 3600
    os.utime(tmp_path / "c/run/starts.json", (hour_ago, hour_ago))
    assert {entry_of(run)["state"]: run for run in states.values()} == states


@pytest.mark.skipif(not began(os.getpid()), reason="only Linux tells when a process began")
def test_a_run_was_killed_though_its_number_is_another_processs_or_a_zombies(
    tmp_path: Path,
) -> None:
    begun = began(os.getpid())
    assert entry_of(start(tmp_path / "a", process_began=begun))["state"] == "running"
    assert entry_of(start(tmp_path / "b", process_began=f"{begun}0"))["state"] == "killed"
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None and zombie.stdout.read() == b""
    deadline = time.monotonic() + HANG_S
    while began(zombie.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert entry_of(start(tmp_path / "c", process=zombie.pid))["state"] == "killed"
    zombie.wait()


def test_a_live_run_says_its_step_and_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path / "run", time=datetime.fromtimestamp(0, UTC).isoformat())
    monitor = JsonLinesMonitor(run / "monitor")
    for step in range(1, 39):
        monkeypatch.setattr(time, "time", lambda step=step: step * 0.5)
        monitor.log({"actor/loss": 1.0}, step, "trainer")
    entry = entry_of(run)
    assert (entry["step"], entry["total"], entry["left"]) == (38, 400, pytest.approx(181.0))
    assert entry_of(start(run, **ended("stopped")))["left"] is None


def test_of_several_explorers_the_figures_are_those_of_a_step_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = datetime.fromtimestamp(0, UTC).isoformat()
    run = start(tmp_path / "run", mode="explore", name="b", time=begun,
                steps={"by": "explorer", "total": 100})  # fmt: skip
    # a makes a step in 3 s, b in 1 s
    logged = [("a", step, 3.0 * step) for step in range(1, 5)]
    logged += [("b", step, 1.0 * step) for step in range(1, 13)]
    for name, step, when in logged:
        monkeypatch.setattr(time, "time", lambda when=when: when)
        monitor = JsonLinesMonitor(run / "monitor" / name)
        monitor.log({"rollout/reward/mean": 0.5 if name == "a" else 0.25}, step, "explorer")
    entry = entry_of(run)
    assert (entry["step"], entry["reward"], entry["left"]) == (12, 0.25, pytest.approx(88.0))
    for name, step, right in (("a", 1, 0.75), ("a", 2, 0.25), ("b", 1, 0.25), ("b", 2, 0.5)):
        monitor = JsonLinesMonitor(run / "monitor" / name)
        monitor.log({"eval/test/accuracy/mean@1": right}, step, "eval")
    assert entry_of(run)["best"] == {"measure": "accuracy", "value": 0.5, "step": 1}
    JsonLinesMonitor(run / "monitor/a").log({"rollout/reward/mean": 0.75}, 12, "explorer")
    assert entry_of(run)["reward"] == 0.5


def test_a_run_stays_what_it_is_when_its_checkpoints_are_measured(tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        config = {"algorithm": {"algorithm_type": "grpo", "optimizer": {"lr": rate}}}
        run = start(tmp_path / name, config=config, mode="train", **ended("finished"))
    (entry,) = json.loads((run / "run/starts.json").read_text())["starts"]
    (run / "run/start_2.yaml").write_text(yaml.safe_dump({**config, "mode": "bench"}))
    other = entry | {"mode": "bench", "config_file": "start_2.yaml",
                     "steps": {"by": "explorer", "total": None}}  # fmt: skip
    other.pop("end")
    (run / "run/starts.json").write_text(json.dumps({"starts": [entry, other]}))
    for step in (1, 2):
        JsonLinesMonitor(run / "monitor").log({"actor/loss": 1.0}, step, "trainer")
    runs = sorted(find_runs(tmp_path), key=lambda one: one.name)
    one, two = Entries().of(runs)
    assert (two["kind"], two["step"], two["total"], two["left"]) == ("grpo", 2, 400, None)
    assert (one["state"], two["state"]) == ("finished", "running")
    assert [one["settings"], two["settings"]] == [{"lr": 0.1}, {"lr": 0.2}]
    assert [change["key"] for change in compared(*runs)] == ["algorithm.optimizer.lr"]


def test_an_explorer_that_starts_last_does_not_decide_what_a_run_is(tmp_path: Path) -> None:
    config = {"algorithm": {"algorithm_type": "grpo"}}
    run = start(tmp_path / "run", config=config, mode="train")
    (entry,) = json.loads((run / "run/starts.json").read_text())["starts"]
    steps = {"by": "explorer", "total": 7}
    explorers = [entry | {"mode": "explore", "name": name, "steps": steps} for name in "ab"]
    (run / "run/starts.json").write_text(json.dumps({"starts": [entry, *explorers]}))
    told = entry_of(run)
    assert (told["kind"], told["mode"], told["total"]) == ("grpo", "train", 400)
    (run / "run/starts.json").write_text(json.dumps({"starts": explorers}))
    assert (entry_of(run)["kind"], entry_of(run)["total"]) == ("explores", 7)


@pytest.mark.parametrize("mode", ["bench", "explore", ""])
def test_a_run_that_only_measured_or_explored_elsewhere_has_finished(
    tmp_path: Path, mode: str
) -> None:
    run = start(tmp_path / "run", mode=mode, name="", host="another")
    monitor = JsonLinesMonitor(run / "monitor")
    monitor.log({"bench/test/accuracy/mean@1": 0.5}, 0, "bench")
    long_ago = time.time() - 10 * SILENT_S
    files = [run / "monitor/metrics.jsonl", run / "run/starts.json"]
    if not mode:
        files.pop().unlink()  # made without the record of starts
    for file in files:
        os.utime(file, (long_ago, long_ago))
    assert entry_of(run)["state"] == "unknown"
    summary = run / "monitor" / ("" if mode == "explore" else "bench") / "summary.json"
    write_json(summary, {"accuracy_before": 0.5})
    assert entry_of(run)["state"] == "finished"
    (found,) = find_runs(run)
    assert about(found)["summary"] == {"accuracy_before": 0.5}


def test_a_killed_attempt_lasted_until_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = 86400.0
    run = start(tmp_path / "run")
    (entry,) = json.loads((run / "run/starts.json").read_text())["starts"]
    ends = {"how": "finished", "error": "", "time": datetime.fromtimestamp(day + 60, UTC)}
    starts = [
        entry | {"time": datetime.fromtimestamp(0, UTC)},
        entry | {"time": datetime.fromtimestamp(day, UTC), "end": ends},
    ]
    (run / "run/starts.json").write_text(json.dumps({"starts": starts}, default=str))
    monitor = JsonLinesMonitor(run / "monitor")
    for step, when in ((1, 10.0), (2, 20.0), (3, day + 30), (4, day + 50)):
        monkeypatch.setattr(time, "time", lambda when=when: when)
        monitor.log({"actor/loss": 1.0}, step, "trainer")
    os.utime(monitor.path, (day + 50, day + 50))
    assert entry_of(run)["seconds"] == 20 + 60


def test_the_figures_are_read_on_and_read_anew_where_a_file_was_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (found,) = find_runs(run)
    entries = Entries()
    entry = entries.entry(found)
    assert entry["reward"] == 0.3 and entry["step"] == 3
    assert entry["best"] == {"measure": "accuracy", "value": 0.3, "step": 3}
    monitor = JsonLinesMonitor(run / "monitor")
    monitor.log({"rollout/reward/mean": 0.9}, 4, "explorer")
    monitor.log({"eval/held_out/accuracy/mean@1": 0.2}, 4, "eval")
    entry = entries.entry(found)
    assert entry["reward"] == 0.9 and entry["best"]["step"] == 3
    monitor.keep_until({"explorer": 2, "eval": 2, "trainer": 2})
    entry = entries.entry(found)
    assert (entry["reward"], entry["step"], entry["best"]["step"]) == (0.2, 2, 2)


def test_a_run_that_was_deleted_and_made_again_is_read_anew_even_with_the_same_inode(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run/monitor/metrics.jsonl"
    path.parent.mkdir(parents=True)
    entries = Entries()
    for number, reward in enumerate((0.25, 0.5, 0.75)):
        rows = [
            {"time": 1e9 + number, "part": "explorer", "step": step,
             "metrics": {"rollout/reward/mean": reward}}
            for step in range(1, 4 + number)
        ]  # fmt: skip
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))  # which keeps its inode
        (found,) = find_runs(tmp_path / "run")
        entry = entries.entry(found)
        assert (entry["reward"], entry["step"]) == (reward, 3 + number)


def test_hidden_runs_are_left_out_of_the_list_and_notes_are_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, steps=1)
    one, two = find_runs(tmp_path)
    write_note(one, "the\nbest", hidden=False)
    write_note(two, "", hidden=True)
    assert list_runs(tmp_path) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("note") and out[1].endswith("the best") and out[2] == ""
    assert out[3] == "1 hidden on the page: --all lists them too"
    assert list_runs(tmp_path, hidden=True) == 0 and "b  " in capsys.readouterr().out
    one.note.write_text("{")
    (tmp_path / "b/run/starts.json").write_text("[")
    (left,) = Entries().of([one, two])  # what is damaged hides no other run
    assert (left["name"], left["note"]) == ("a", "") and one.note.read_text() == "{"
    with pytest.raises(ValueError, match="3,000 characters: expected at most 2,000"):
        write_note(one, "x" * 3000, hidden=False)


def test_list_finds_runs_by_words_of_name_note_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "a", config={"seed": 7}, **ended("stopped"))
    start(tmp_path / "b", config={"seed": 8}, **ended("failed", ERROR))
    for run in find_runs(tmp_path):
        write_note(run, "#sweep" if run.name == "a" else "#sweeping", hidden=False)
    found = {}
    for words in ("#SWEEP", "#sweep stopped", "seed=8", "b failed"):
        assert list_runs(tmp_path, find=words) == 0
        lines = capsys.readouterr().out.splitlines()
        found[words] = [line[0] for line in lines if line[:2] in ("a ", "b ")]
    assert found == {
        "#SWEEP": ["a", "b"],
        "#sweep stopped": ["a"],
        "seed=8": ["b"],
        "b failed": ["b"],
    }
    assert list_runs(tmp_path, find="c stopped") == 1
    error = f"error: none of 2 runs below {tmp_path} has 'c stopped' in its name, state,"
    assert capsys.readouterr().err.startswith(error)


def test_settings_that_differ_have_short_names_and_the_rarest_come_first(tmp_path: Path) -> None:
    for name, rate, steps in (("a", 0.1, 10), ("b", 0.1, 20), ("c", 0.2, 20), ("d", 0.1, 20)):
        config = {"name": name, "algorithm": {"algorithm_type": "grpo", "optimizer": {"lr": rate},
                  "critic": {"lr": 1}}, "buffer": {"total_steps": steps}}  # fmt: skip
        start(tmp_path / name, config=config)
    start(tmp_path / "e", config={"algorithm": {"algorithm_type": "sft"}}, mode="train")
    found = dict(zip("abcde", differing(sorted(find_runs(tmp_path), key=lambda run: run.name)),
                     strict=True))  # fmt: skip
    assert list(found["a"].items()) == [("total_steps", 10), ("lr", 0.1)]
    assert list(found["c"].items()) == [("lr", 0.2), ("total_steps", 20)]
    assert found["e"] == {}
    start(
        tmp_path / "z", config={"algorithm": {"algorithm_type": "rloo", "optimizer": {"lr": 0.1}}}
    )
    *_, last = differing(sorted(find_runs(tmp_path), key=lambda run: run.name))
    assert last == {"algorithm_type": "rloo", "lr": 0.1}, "an algorithm is a setting, too"
    shutil.rmtree(tmp_path / "z")
    entries = Entries()
    assert [entry["settings"] for entry in entries.of(find_runs(tmp_path))].count({}) == 1
    JsonLinesMonitor(tmp_path / "f/monitor").log({"actor/loss": 1.0}, 1, "trainer")
    assert [entry["settings"] for entry in entries.of(find_runs(tmp_path))].count({}) == 2


def test_a_setting_that_an_older_release_lacks_is_no_difference(tmp_path: Path) -> None:
    old = {"model": {"path": "m", "lora": None}, "tasks": [{"name": "x"}], "seed": 1}
    new = {"model": {"path": "m", "lora": {"rank": 4}, "newer": 3}, "tasks": [], "seed": 1}
    for name, config in (("a", old), ("b", new)):
        start(tmp_path / name, config=config)
    one, two = find_runs(tmp_path)
    keys = ["model.lora.rank", "tasks", "tasks[0].name"]
    assert [change["key"] for change in compared(one, two)] == keys
    assert differing([one, two]) == [{"name": "x"}, {"rank": 4, "tasks": []}]


def test_list_and_compare_print_what_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "job/first")
    start(tmp_path / "job/second", config={"seed": 8}, **ended("failed", ERROR))
    assert list_runs(tmp_path) == 0
    head, first, second, _, *rest = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "state", "steps", "reward"]
    assert (
        first.split()[:4] == ["job/first", "running", "3", "0.300"] and "30.0% at step 3" in first
    )
    assert second.split()[:5] == ["job/second", "failed", "0", "of", "400"] and "seed=8" in second
    assert "\n".join(rest).startswith(f"job/second: {ERROR}")
    start(tmp_path / "job/third", config={"seed": 9})
    assert compare(["first", str(tmp_path / "job/second"), "third"], tmp_path) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["seed", "7", "8", "9"] in rows
    with pytest.raises(ValueError, match=r"no run 'secnd' below .*did you mean 'second'"):
        run_named("secnd", tmp_path)
    assert compare(["first", "secnd"], tmp_path) == 1
    assert list_runs(tmp_path / "nowhere") == 1

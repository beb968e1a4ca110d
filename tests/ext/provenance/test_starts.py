"""What a run's folder says of its starts, and what a resume says has changed."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.job import small_config
from tests.e2e.test_damaged_files import DAMAGES
from tests.tiny import make_model
from trireme.checkpoint.layout import MANIFEST, JobFolder
from trireme.checkpoint.manifest import WITHOUT_CHECKSUMS
from trireme.cli.run import run as command
from trireme.config import load_config
from trireme.config.schema import Config
from trireme.data.rows import DataSet, Rows
from trireme.ext.provenance import starts
from trireme.ext.provenance.changes import changes
from trireme.ext.provenance.starts import add_end, add_start, data_facts, read_starts
from trireme.launch.check import make_plans
from trireme.launch.resume import ADAPTER_BASE
from trireme.monitor.events import Ended
from trireme.registry import COMMANDS, SOURCES


def plan_of(folder: Path, config: dict[str, Any], *overrides: str) -> Any:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(config))
    return make_plans(load_config(path, overrides))


def entry(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "config": config,
        "data": {},
        "model": {"path": "m", "weights": "w", "tokenizer": "t"},
        "plugins": {},
        "versions": {},
        "code": {},
    }
    return plain | more


DATA = "buffer.explorer_input.taskset"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({}, {}, []),
        (
            {"config": {"algorithm": {"optimizer": {"lr": 0.1}}}},
            {"config": {"algorithm": {"optimizer": {"lr": 0.2}}}},
            ["algorithm.optimizer.lr: 0.1 -> 0.2: from train step 3 on; the optimizer's moments"],
        ),
        (
            {"config": {"model": {"model_path": "a"}}},
            {"config": {"model": {"model_path": "b"}}, "model": {"path": "b"}},
            ["model.model_path: a -> b: its weights are ignored, since the checkpoint's are"],
        ),
        (
            {"data": {DATA: {"path": "d", "rows": 5, "sha256": "x" * 64}}},
            {"data": {DATA: {"path": "d", "rows": 6, "sha256": "y" * 64}}},
            [f"{DATA} rows: 5 -> 6: tasks from explore step 4 on: the run continues at row 12"],
        ),
        (
            {"data": {DATA: {"path": "d", "rows": 5, "sha256": "x" * 64}}},
            {"data": {DATA: {"path": "d", "rows": 5, "sha256": "y" * 64}}},
            [f"{DATA} contents differ: tasks from explore step 4 on: the run continues at row 12"],
        ),
        (
            {"plugins": {"/a/mine.py": "x" * 64}, "code": {"trireme": "c1"}},
            {"plugins": {"/a/mine.py": "y" * 64}, "code": {"trireme": "c2"}},
            ["plugins mine.py differ: your own code, from now on", "code.trireme: c1 -> c2: from"],
        ),
        (
            {"config": {"seed": 1}, "versions": {"torch": "2.1"}},
            {"config": {"seed": 2}, "versions": {"torch": "2.2"}},
            ["seed: 1 -> 2: samples from explore step 4 on", "versions.torch: 2.1 -> 2.2"],
        ),
    ],
)
def test_each_change_is_told_with_its_effect(
    old: dict[str, Any], new: dict[str, Any], told: list[str]
) -> None:
    found = changes(entry({}) | old, entry({}) | new, train=3, explore=4, row=12)
    assert len(found) == len(told), found
    for line, beginning in zip(found, told, strict=True):
        assert line.startswith(beginning)


def test_keys_that_a_newer_release_has_are_no_changes_unless_they_are_set() -> None:
    buffer = {
        "explorer_input": {"taskset": {"path": "d"}},
        "trainer_input": {"auxiliary_buffers": {"more": {"path": "e"}}},
    }
    config = Config.model_validate({"buffer": buffer, "model": {"lora_configs": [{}]}})
    old, new = config.model_dump(), config.model_dump()
    del old["trainer"]["callbacks"], old["buffer"]["explorer_input"]["taskset"]["split"]
    del old["buffer"]["trainer_input"]["auxiliary_buffers"]["more"]["capacity"]
    del old["model"]["lora_configs"][0]["lora_rank"], old["monitor"]
    assert changes(entry(old), entry(new), train=3, explore=4, row=12) == []
    new["trainer"]["callbacks"] = ["mine:Mine"]
    old["model"]["lora_configs"] = None  # null is a value
    found = changes(entry(old), entry(new), train=3, explore=4, row=12)
    assert "trainer.callbacks: [] -> ['mine:Mine']: from train step 3 on" in found
    [line] = [line for line in found if line.startswith("model.lora_configs")]
    assert line.startswith("model.lora_configs[0]: none -> {")


def test_a_section_that_came_or_went_is_one_line() -> None:
    given = {"taskset": {"name": "first", "path": "d"}}
    several = {"tasksets": [given["taskset"], {"name": "second", "path": "e"}]}
    old, new = (
        Config.model_validate({"buffer": {"explorer_input": each}}).model_dump()
        for each in (given, several)
    )
    found = changes(entry(old), entry(new), train=3, explore=4, row=12)
    assert [line.partition(", storage_type")[0] for line in found] == [
        f"{DATA}: {{name: first",
        f"{DATA}s[0]: none -> {{name: first",
        f"{DATA}s[1]: none -> {{name: second",
    ]


def started(
    folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str, expected: int = 0
) -> tuple[str, str]:
    """What `trireme run` prints; in this process, where torch is loaded."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(small_config(folder)))
    capsys.readouterr()
    code = command(path, overrides, ())
    output = capsys.readouterr()
    assert code == expected, output.err
    return output.out, output.err


def test_a_run_tells_what_it_was_and_a_resume_what_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "checkpoints/tests/job"
    key = "explorer.rollout_model.api_key=secret7"
    keys = (key, "explorer.env_vars={OPENAI_KEY: secret7, DB_PASS: secret7}")
    out, _ = started(tmp_path, capsys, "buffer.total_steps=2", *keys)
    assert "changed since" not in out
    assert "sync_method" not in out  # nobody has set it
    make_model(tmp_path / "other", seed=1, max_len=256)
    other = ("algorithm.optimizer.lr=0.01", f"model.model_path={tmp_path}/other")
    out, _ = started(tmp_path, capsys, *other)
    for told in ("algorithm.optimizer.lr: 0.001 -> 0.01: from train step 3", "weights are ignored"):
        assert told in out
    out, _ = started(tmp_path, capsys, *other)
    assert "nothing has changed since its last start" in out
    assert "step 4 was this run's last. To train on, raise buffer.total_steps (4)" in out

    starts = json.loads((job / "run/starts.json").read_text())["starts"]
    assert [start["resumed_from"] for start in starts] == [None, 2, 4]
    assert [s["config_file"] for s in starts] == ["start_1.yaml", "start_2.yaml", "start_2.yaml"]
    assert starts[0]["data"][DATA]["rows"] == 16
    assert starts[0]["versions"].keys() >= {"python", "trireme", "torch", "transformers"}
    assert starts[0]["seed"] == 42
    assert starts[0]["command"] and starts[0]["process"] == os.getpid()
    assert [start["end"]["how"] for start in starts] == ["finished"] * 3
    assert starts[2]["steps"] == {"by": "trainer", "total": 4}
    assert not [
        path for path in job.rglob("*") if path.is_file() and b"secret7" in path.read_bytes()
    ]
    (plan,) = make_plans(load_config(job / "run/start_2.yaml"))
    assert plan.job_dir == job
    summary = json.loads((job / "summary.json").read_text())
    if shows := next((name for name in ("view", "convert") if name in COMMANDS), None):
        assert None not in summary.values()
        assert summary["next_command"].startswith(f"trireme {shows} ")


def test_a_command_is_recorded_as_a_shell_would_start_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for program, words in (
        ("/env/bin/trireme", ["/env/bin/trireme"]),
        ("/lib/trireme/__main__.py", ["python", "-m", "trireme"]),
    ):
        monkeypatch.setattr("sys.argv", [program, "run", "a.yaml"])
        assert starts._command() == [*words, "run", "a.yaml"]


def test_a_start_records_the_sentence_and_the_place_of_the_error_that_ended_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prices.py").write_text(
        "from trireme import reward\n\n@reward('price')\ndef price(task, answer):\n"
        "    return {'eggs': 1.0}['milk']\n"
    )
    own = (f"plugins=[{tmp_path}/prices.py]", "buffer.explorer_input.default_reward_fn_type=price")
    _, err = started(tmp_path, capsys, *own, expected=1)
    job = JobFolder(tmp_path / "checkpoints/tests/job")
    (start,) = json.loads(job.starts.read_text())["starts"]
    sentence, place = start["end"]["error"].split("\n")
    assert start["end"]["how"] == "failed" and sentence in err
    assert "KeyError: 'milk'" in sentence and f"{tmp_path}/prices.py:5" in place
    add_end(job, start, Ended(failed=True))
    assert json.loads(job.starts.read_text())["starts"][0]["end"]["how"] == "stopped"


def test_a_checkpoint_of_an_earlier_release_is_resumed_only_with_what_its_start_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its manifest does not say what it was made with: `resumes` of run/starts.json does."""
    make_model(tmp_path / "other", seed=1, max_len=256)
    lora = "model.lora_configs=[{lora_rank: 4}]"
    started(tmp_path, capsys, "buffer.total_steps=1", lora)
    job = JobFolder(tmp_path / "checkpoints/tests/job")
    path = job.step_dir(1) / MANIFEST
    manifest = json.loads(path.read_text())
    recorded = manifest["state"].pop("made_with")
    del manifest["checksum"], manifest["xxh3_128"]
    manifest["format"] = WITHOUT_CHECKSUMS
    path.write_text(json.dumps(manifest))
    held = json.loads(job.starts.read_text())
    held["starts"][0]["resumes"] = {k: v for k, v in recorded.items() if k != ADAPTER_BASE}
    job.starts.write_text(json.dumps(held))
    for override, told in (
        ("algorithm.optimizer.optimizer_type=sgd", "had optimizer adamw, and now has sgd"),
        ("model.lora_configs=[{lora_rank: 4, lora_alpha: 8}]", "alpha 32, and now has of rank 4"),
        (f"model.model_path={tmp_path}/other", "has a LoRA adapter of other weights than"),
    ):
        _, errors = started(tmp_path, capsys, "buffer.total_steps=2", lora, override, expected=2)
        assert told in errors
    started(tmp_path, capsys, "buffer.total_steps=2", lora)  # as it was


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["starts.json", "start_1.yaml"])
def test_a_damaged_start_is_left_out_and_its_file_stays(
    name: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = JobFolder(tmp_path / "job")
    tables = {key: {} for key in ("model", "data", "plugins", "versions", "code")}
    entry = {"time": "now", "mode": "both", "name": None, "folder": ".", **tables}
    for seed in (1, 2):
        add_start(folder, {**entry, "config": {"seed": seed}})
    assert [one["config"]["seed"] for one in read_starts(folder)] == [1, 2]
    path = folder.starts.parent / name
    DAMAGES[damage](path)
    if name == "start_1.yaml" and damage == "half of it":
        path.write_text("seed: [")
    with caplog.at_level(logging.WARNING):
        left = [one["config"]["seed"] for one in read_starts(folder)]
    assert left == ([] if name == "starts.json" else [2])
    assert len([text for text in caplog.messages if str(path) in text]) == 1, caplog.messages
    add_start(folder, {**entry, "config": {"seed": 3}})
    assert [one["config"]["seed"] for one in read_starts(folder)] == [*left, 3]
    assert os.path.lexists(path.with_name(f"{name}.damaged"))
    assert json.loads(folder.starts.read_text())["starts"][-1]["config_file"] == "start_3.yaml"


class Count:
    """Rows that are made when they are read."""

    reproducible = True

    def takes(self, data: DataSet) -> bool:
        return data.path.startswith("count:")

    def files(self, data: DataSet) -> list[Path]:
        return []

    def read(self, data: DataSet) -> Rows:
        rows = [{"prompt": f"{n} + 1?"} for n in range(int(data.path.removeprefix("count:")))]
        return Rows(f"dataset '{data.path}'", rows, ("prompt",))


def test_rows_of_a_source_without_files_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES._registered, "count", Count)
    assert data_facts(DataSet("count:4")) == {"path": "count:4", "rows": 4, "sha256": None}


@pytest.mark.extension("sql")
def test_a_table_that_has_changed_has_another_fingerprint(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'tasks.db'}"
    with sqlite3.connect(tmp_path / "tasks.db") as store:
        store.execute("create table sums (id integer primary key, question text, answer text)")
        store.executemany(
            "insert into sums values (?, ?, ?)", [(1, "1 + 1?", "2"), (2, "1 + 2?", "3")]
        )
    before = data_facts(DataSet(url, otherwise="sums"))
    assert (before["rows"], before["path"]) == (2, url)
    assert data_facts(DataSet(url, "sums")) == before
    with sqlite3.connect(tmp_path / "tasks.db") as store:
        store.execute("insert into sums values (0, '0 + 0?', '0')")
    after = data_facts(DataSet(url, "sums"))
    assert after["rows"] == 3 and after["sha256"] != before["sha256"]

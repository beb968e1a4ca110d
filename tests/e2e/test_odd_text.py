"""Whole runs whose workflow gives texts that are no text, in every store, and a damaged row."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.buffer.test_contract import database
from tests.e2e.job import run, small_config, started, wait_for, write_jsonl
from tests.e2e.test_modes import metrics
from tests.odd import NUL
from tests.tiny import make_model
from trireme.buffer.trained import FOLDER, eids_of, files

COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


def odd_config(folder: Path, store: str, path: str | None) -> dict[str, Any]:
    config = small_config(folder)
    config["model"] |= {
        "model_path": str(make_model(folder / "wide", max_len=4096)),
        "max_model_len": 4096,
        "max_response_tokens": 4,
    }
    config["buffer"] |= {"total_steps": 2, "train_batch_size": 16}
    inputs = config["buffer"]["explorer_input"]
    inputs["default_workflow_type"] = "tests.e2e.odd_text:odd_texts"
    inputs["eval_tasksets"][0]["workflow_args"] = {"word": "odd"}
    rows = [{"question": f"What is {NUL}{n} + 1?", "answer": f"#### {n}{NUL}"} for n in range(16)]
    write_jsonl(Path(inputs["taskset"]["path"]), rows)
    buffer: dict[str, Any] = {"name": "e"}
    if path is not None:
        buffer |= {"storage_type": "sql", "path": path}
    if store == "replay":
        buffer["replay_buffer"] = {"enable": True}
    config["buffer"]["trainer_input"] = {"experience_buffer": buffer}
    config["explorer"] |= {"eval_on_startup": False, "eval_interval": 2}
    return config


def learned(job: Path) -> Counter[str]:
    """How often each experience was trained."""
    steps = files(job / "buffer" / FOLDER)
    return Counter(eid for _, path in steps for eid in eids_of(path))


@pytest.mark.parametrize("store", ["queue", "sqlite", "postgres"])
def test_odd_texts_end_no_run_and_every_experience_is_learned_once(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.param = store
    url = None if store == "queue" else database(request, tmp_path)
    done = run(tmp_path, odd_config(tmp_path, store, url))

    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    job = tmp_path / "checkpoints/tests/job"
    counts = learned(job)
    assert len(counts) == 32 and set(counts.values()) == {1}
    assert COMMANDS.findall(said) == []
    logs = list((job / "log").glob("*.log"))
    assert logs and all(not COMMANDS.findall(log.read_text()) for log in logs)


def test_a_damaged_row_is_a_sentence_and_the_trainer_goes_on_without_it(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config["buffer"] |= {"total_steps": 2, "train_batch_size": 8}
    buffer = {"name": "e", "storage_type": "sql", "path": f"sqlite:///{tmp_path}/e.db"}
    config["buffer"]["trainer_input"] = {"experience_buffer": buffer}
    config["explorer"] |= {"eval_on_startup": False, "eval_interval": 100}
    config["synchronizer"] = {"sync_interval": 2}
    explorer = started(tmp_path, config, "mode=explore")
    meta = tmp_path / "checkpoints/tests/job/explorer_meta.json"
    two_steps = '"latest_iteration": 2'
    wait_for(lambda: meta.exists() and two_steps in meta.read_text(), explorer)
    explorer.kill()  # it waits for weights
    with closing(sqlite3.connect(tmp_path / "e.db")) as database, database:
        (data,) = database.execute("SELECT experience_bytes FROM e WHERE id = 17").fetchone()
        bad = data[:-30] + bytes([data[-30] ^ 8]) + data[-29:]
        database.execute("UPDATE e SET experience_bytes = ? WHERE id = 17", [bad])

    ended = run(tmp_path, config, "mode=train", "trainer.total_steps=3")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "error: row 17 of table e in 'sqlite:///" in ended.stderr
    assert "is damaged (" in ended.stderr and "Traceback" not in ended.stderr

    left_out = "buffer.trainer_input.experience_buffer.on_error=skip"
    done = run(tmp_path, config, "mode=train", "trainer.total_steps=3", left_out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning: row 17 of table e" in done.stderr
    job = tmp_path / "checkpoints/tests/job"
    assert metrics(job, "trainer")[-1]["buffer/damaged"] == 1.0
    with closing(sqlite3.connect(tmp_path / "e.db")) as database:
        rows = database.execute("SELECT msg_id, id, consumed, claimed_by FROM e").fetchall()
    used = {eid for eid, _, consumed, _ in rows if consumed == 1}
    assert {by for _, _, _, by in rows} == {None} and len(used) == 24
    assert [row for _, row, consumed, _ in rows if consumed == -1] == [17]
    assert learned(job) == dict.fromkeys(used, 1)

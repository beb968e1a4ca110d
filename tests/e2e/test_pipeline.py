"""Operators in a whole run: killed and resumed, the same weights, nothing doubled."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

from tests.e2e.job import run, small_config, started, weights

HERE = "tests.e2e.test_pipeline"


def without_the_last(rows: list[dict[str, Any]], *, count: int) -> list[dict[str, Any]]:
    return [row | {"seen": True} for row in rows[:-count]]


def config_with_operators(folder: Path) -> dict[str, Any]:
    config = small_config(folder)
    config["algorithm"]["sample_strategy"] = "explore_step"
    config["data_processor"] = {
        "experience_pipeline": {
            "operators": [
                {"name": "reward_filter", "args": {"threshold": 0.2}},
                {"name": "pass_rate_calculator"},
            ]
        },
        "task_pipeline": {
            "operators": [{"name": f"{HERE}:without_the_last", "args": {"count": 3}}]
        },
    }
    return config


def kept_ids(job: Path) -> Counter[str]:
    lines = (job / "buffer/experience_buffer.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert all(line["reward"] >= 0.2 for line in found)
    return Counter(line["eid"] for line in found)


def test_a_killed_run_with_operators_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    config = config_with_operators(whole)
    done = run(whole, config)
    assert done.returncode == 0, done.stdout + done.stderr
    job = whole / "checkpoints/tests/job"

    config["checkpoint_root_dir"] = str(killed / "checkpoints")
    other = killed / "checkpoints/tests/job"
    process = started(killed, config)
    process.kill_when(other / "global_step_2")
    assert process.returncode == -signal.SIGKILL
    done = run(killed, config)
    assert done.returncode == 0, done.stdout + done.stderr

    assert weights(other, 4) == weights(job, 4)
    assert kept_ids(other) == kept_ids(job)
    assert 0 < len(kept_ids(job)) < 4 * 4 * 4 and set(kept_ids(job).values()) == {1}
    with sqlite3.connect(other / "buffer/explorer_output.db") as database:
        [(raw, least)] = database.execute("select count(*), min(reward) from experiences")
    assert raw == 4 * 4 * 4 and least < 0.2
    assert len(list((other / "buffer").glob("sums-*.jsonl"))) == 1

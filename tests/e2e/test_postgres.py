"""Explorers and a trainer as separate commands on a PostgreSQL store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import Forked, command, small_config, started, trireme
from tests.e2e.test_modes import metrics
from tests.limits import HANG_S
from tests.postgres import PASSWORD, Server


def start(folder: Path, config: dict[str, Any], *overrides: str) -> Forked:
    folder.mkdir()
    return started(folder, config, *overrides)


def wait_for_explorers(url: str, number: int) -> None:
    import psycopg

    deadline, found = time.monotonic() + HANG_S, 0
    while found < number:
        assert time.monotonic() < deadline, f"{found} explorers of {number} came"
        time.sleep(0.2)
        with psycopg.connect(url) as connection:
            try:
                row = connection.execute("SELECT count(*) FROM shared_parties").fetchone()
            except psycopg.errors.UndefinedTable:
                continue
            found = row[0] if row else 0


@pytest.mark.large
def test_two_explorers_feed_a_trainer_and_nobody_says_the_password(
    postgres: Server, tmp_path: Path
) -> None:
    import psycopg

    url = postgres.database()
    config = small_config(tmp_path)
    config["buffer"]["train_batch_size"] = 16
    config["buffer"]["trainer_input"] = {
        "experience_buffer": {"storage_type": "sql", "name": "shared", "path": url}
    }
    config["explorer"]["eval_on_startup"] = False
    config["data_processor"] = {
        "experience_pipeline": {"operators": [{"name": "deduplication"}, {"name": "reward_filter"}]}
    }
    running = {
        "explorer": start(tmp_path / "e", config, "mode=explore"),
        "second": start(tmp_path / "s", config, "mode=explore", "explorer.name=second"),
    }
    said = {}
    try:
        # the end of the only explorer there is would be the end of all
        wait_for_explorers(url, 2)
        running["trainer"] = start(tmp_path / "t", config, "mode=train", "trainer.total_steps=99")
        for name, process in running.items():
            process.ends_well()
            said[name] = process.said()
    finally:
        for process in running.values():
            process.kill()

    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT msg_id, source, consumed, claimed_by FROM shared"
        ).fetchall()
    wanted = {str(step) for step in range(1, 5)} | {f"{step}/second" for step in range(1, 5)}
    assert {source for _, source, _, _ in rows} == wanted
    assert {(consumed, claimed) for _, _, consumed, claimed in rows} == {(1, None)}
    job = tmp_path / "checkpoints/tests/job"
    explored = metrics(job, "explorer") + metrics(job, "explorer", "second")
    kept = sum(row["experience_pipeline/experience_count"] for row in explored)
    assert kept == len(rows) == len({uid for uid, *_ in rows})
    written = "".join(said.values())
    for path in (path for path in job.rglob("*") if path.is_file()):
        written += path.read_bytes().decode(errors="replace")
    assert PASSWORD not in written
    assert (job / "explorer_meta.json").exists() and (job / "second_meta.json").exists()


def test_check_shows_the_store_without_its_password(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    url = f"postgresql://me:{PASSWORD}@127.0.0.1:1/none"
    config["buffer"]["trainer_input"] = {"experience_buffer": {"storage_type": "sql", "path": url}}
    command(tmp_path, config)
    for word in ("check", "run"):
        done = trireme(tmp_path, word, "config.yaml")
        said = done.stdout + done.stderr
        assert "me:***@127.0.0.1:1/none" in said
        assert PASSWORD not in said
        assert done.returncode == (1 if word == "run" else 0), said

"""Whole runs whose workflow gives texts that are no text, in every store, and a damaged row."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.buffer.test_contract import database
from tests.e2e.agent import serving, until
from tests.e2e.job import run, small_config, started, wait_for, write_jsonl
from tests.e2e.test_command import ON_RAY as RAY
from tests.e2e.test_command import needs_ray
from tests.e2e.test_modes import metrics
from tests.e2e.test_two_commands import Pair
from tests.ext.http import bad
from tests.limits import HANG_S
from tests.odd import ALL, NUL, ODD
from tests.tiny import make_model
from trireme.buffer.trained import FOLDER, eids_of, files
from trireme.text import joined

JOB = "checkpoints/tests/job"
JSON = "application/json"
SENT = joined(ALL)
"""What HTTP takes: a body that holds half a pair is refused."""
KEYS = dict.fromkeys((joined(text) for text in ODD.values() if len(text) < 64), SENT)
PLACES = "cluster.gpu_per_node=2"
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


def no_commands(job: Path, said: str) -> None:
    """Neither what was printed nor a log holds what a terminal would obey."""
    assert COMMANDS.findall(said) == []
    logs = list((job / "log").glob("*.log"))
    assert logs and all(not COMMANDS.findall(log.read_text()) for log in logs)


def all_learned(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """It ended well, and each of the 2 x 16 experiences was trained once."""
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    job = folder / JOB
    counts = learned(job)
    assert len(counts) == 32 and set(counts.values()) == {1}
    no_commands(job, said)


@pytest.mark.parametrize("store", ["queue", "sqlite", "postgres"])
def test_odd_texts_end_no_run_and_every_experience_is_learned_once(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.param = store
    url = None if store == "queue" else database(request, tmp_path)
    all_learned(tmp_path, run(tmp_path, odd_config(tmp_path, store, url)))


@pytest.mark.large
@pytest.mark.slow
def test_odd_texts_go_through_engines_of_other_processes(tmp_path: Path) -> None:
    engines = ("explorer.rollout_model.engine_type=torch", "explorer.rollout_model.engine_num=2")
    all_learned(tmp_path, run(tmp_path, odd_config(tmp_path, "queue", None), *engines))


@needs_ray
@pytest.mark.large
@pytest.mark.slow
def test_odd_texts_go_through_ray_and_so_does_the_error_that_ends_a_run(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    all_learned(tmp_path, run(tmp_path, odd_config(tmp_path, "queue", None), *RAY, PLACES))

    workflow = "buffer.explorer_input.default_workflow_type=tests.e2e.odd_text:odd_end"
    config = odd_config(tmp_path, "queue", None) | {"name": "ended"}
    done = run(tmp_path, config, *RAY, PLACES, workflow)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "OddError: page: cut \\ud83d" in said, said
    assert "Ray" not in done.stderr
    no_commands((tmp_path / JOB).with_name("ended"), said)


def test_what_agents_send_and_say_to_a_server_is_learned_once(tmp_path: Path) -> None:
    config = odd_config(tmp_path, "queue", None)
    config["buffer"]["trainer_input"] = {"experience_buffer": {"name": "shared"}}
    config["trainer"]["total_steps"] = 2
    config["explorer"] |= {"proxy_port": 0, "service_status_check_interval": 0.1}
    pair = Pair(tmp_path, config)
    try:
        for mode in ("serve", "train"):
            pair.start(mode)
        url = until(lambda: serving(pair.job / "explorer_server_url.txt"), "the server")
        with httpx.Client(base_url=url, timeout=HANG_S) as client:
            for number in range(2):
                odd_round(client, number)
            assert client.get("/health").status_code == 200
        pair.running["train"].ends_well()
        pair.running["serve"].ends_well()
    finally:
        for process in pair.running.values():
            process.kill()
    counts = learned(pair.job)
    assert len(counts) == 32 and set(counts.values()) == {1}
    no_commands(pair.job, "".join(process.said() for process in pair.running.values()))


def odd_round(client: httpx.Client, number: int) -> None:
    """16 runs of 4 tasks, over each API, with odd texts wherever a program may send one."""

    def post(path: str, body: dict[str, Any]) -> Any:
        reply = client.post(path, content=json.dumps(body), headers={"content-type": JSON})
        assert reply.status_code == 200, ascii(reply.text)
        return reply.json()

    for run_id, (path, body) in enumerate(odd_bodies() * 4):
        name = f"{number}-{run_id}"
        post(f"/s/{name}{path}", {**KEYS, "model": SENT, "user": SENT, "stop": [SENT], **body})
        run = {"task_id": f"{SENT} {run_id // 4}", "run_id": run_id % 4}
        post("/feedback", {"session_id": name, "reward": run_id % 3 / 2, **run})
    for body in ({"session_id": SENT}, {"msg_ids": [SENT]}, {"session_id": ALL}, {ALL: 1}):
        bad.refused(client.post("/feedback", content=json.dumps(body | {"reward": 1})))
    assert post("/commit", {"task_id": f"{SENT} 0"}) == {"committed": 4}
    assert post("/commit", {}) == {"committed": 12}


def odd_bodies() -> list[tuple[str, dict[str, Any]]]:
    """One request of each API."""
    call = {"id": SENT, "type": "function", "function": {"name": SENT, "arguments": SENT}}
    schema = {"type": "object", "properties": {SENT: {"type": "string", "description": SENT}}}
    function = {"name": SENT, "description": SENT, "parameters": schema}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": SENT},
        {"role": "assistant", "content": SENT, "tool_calls": [call]},
        {"role": "tool", "content": SENT, "tool_call_id": SENT},
    ]
    tools = [{"type": "function", "function": function}]
    return [
        ("/v1/chat/completions", {"messages": said, "tools": tools, "max_tokens": 4}),
        ("/v1/completions", {"prompt": SENT, "max_tokens": 4}),
        ("/v1/messages", {"system": SENT, "messages": said[:1], "max_tokens": 4}),
        ("/v1/responses", {"instructions": SENT, "input": SENT, "max_output_tokens": 4}),
    ]


def test_a_damaged_row_is_a_sentence_and_the_trainer_goes_on_without_it(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config["buffer"] |= {"total_steps": 2, "train_batch_size": 8}
    buffer = {"name": "e", "storage_type": "sql", "path": f"sqlite:///{tmp_path}/e.db"}
    config["buffer"]["trainer_input"] = {"experience_buffer": buffer}
    config["explorer"] |= {"eval_on_startup": False, "eval_interval": 100}
    config["synchronizer"] = {"sync_interval": 2}
    explorer = started(tmp_path, config, "mode=explore")
    meta = tmp_path / JOB / "explorer_meta.json"
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
    job = tmp_path / JOB
    assert metrics(job, "trainer")[-1]["buffer/damaged"] == 1.0
    with closing(sqlite3.connect(tmp_path / "e.db")) as database:
        rows = database.execute("SELECT msg_id, id, consumed, claimed_by FROM e").fetchall()
    used = {eid for eid, _, consumed, _ in rows if consumed == 1}
    assert {by for _, _, _, by in rows} == {None} and len(used) == 24
    assert [row for _, row, consumed, _ in rows if consumed == -1] == [17]
    assert learned(job) == dict.fromkeys(used, 1)

"""`trireme rollout` as a command: what it refuses, how it ends, and a run over it."""

from __future__ import annotations

import re
import signal
import socket
import sqlite3
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from tests.e2e.job import run, small_config, started, wait_for
from tests.e2e.test_modes import metrics
from tests.ext.http.made import command, fails
from tests.limits import HANG_S
from tests.tiny import make_model
from tests.vllm import needs_vllm


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--host", "0.0.0.0"], 2, "is open to other machines: give a key in TRIREME_API_KEY"),
        (["--api-key-file", "missing"], 2, "--api-key-file missing cannot be read"),
        (["--multi_turn_scheduler", "nothing"], 2, "nothing"),
        (["--dtype", "int3"], 2, "--dtype int3: expected auto, float32"),
        (["--engine", "sglang"], 2, "--engine sglang is not known: expected torch or vllm"),
        (["--tensor_parallel_size", "2"], 2, "the torch engine runs on one device, expected 1"),
        (
            ["--engine", "vllm", "--engine-python", sys.executable],
            2,
            f"--engine-python {sys.executable}: expected a Python that has vLLM",
        ),
        (["--external_plugins", "missing.py"], 2, "there is no such file"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_sentence(
    tiny_dir: Path, tmp_path: Path, flags: list[str], code: int, message: str
) -> None:
    ended, said = fails(tmp_path, tiny_dir, "--port", "0", *flags)
    assert ended == code and message in said and said.startswith("error: "), said
    assert "Traceback" not in said


@pytest.mark.parametrize("way", ["flag", "file", "environment"])
def test_a_key_is_wanted_by_whichever_way_it_was_given(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    (tmp_path / "key").write_text("secret-one\n")
    flags = {"flag": ["--api-key", "secret-one"], "file": ["--api-key-file", str(tmp_path / "key")]}
    if way == "environment":
        monkeypatch.setenv("TRIREME_API_KEY", "secret-one")
    with command(tmp_path, tiny_dir, *flags.get(way, [])) as (process, url):
        assert httpx.get(f"{url}/v1/models", timeout=HANG_S).status_code == 401
        own = {"authorization": "Bearer secret-one"}
        assert httpx.get(f"{url}/v1/models", headers=own, timeout=HANG_S).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=HANG_S)
    assert ("warning: --api-key is visible to all users" in said) == (way == "flag"), said


def test_a_plug_in_that_fails_to_load_shows_where(tiny_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken_plugin.py"
    broken.write_text("def inside():\n    raise OSError('no disk')\n\n\ninside()\n")
    code, said = fails(tmp_path, tiny_dir, "--port", "0", "--external_plugins", str(broken))
    assert code == 2
    assert f"OSError: no disk\n  {broken}:2: raise OSError('no disk')" in said


SLEEPER = """
import subprocess
import time
from pathlib import Path

from trireme import multi_turns
from trireme.ext.multi_turn.scheduler import MultiTurnScheduler


@multi_turns.register("sleeper")
class Sleeper(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        return infer_request

    async def check_finished(self, infer_request, response_choice, current_turn):
        left = subprocess.Popen(["sleep", "600"])
        Path(__file__).with_name("left").write_text(str(left.pid))
        time.sleep(1000)
"""


def test_a_scheduler_that_blocks_the_server_is_named_and_one_control_c_ends_it(
    tiny_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    flags = (
        "--external_plugins",
        str(tmp_path / "sleeper.py"),
        "--multi_turn_scheduler",
        "sleeper",
    )
    body = {"infer_requests": [{"messages": [{"role": "user", "content": "Hi"}]}],
            "request_config": {"max_tokens": 4}}  # fmt: skip
    with command(tmp_path, tiny_dir, *flags) as (process, url):
        with suppress(httpx.HTTPError):
            httpx.post(f"{url}/infer/", json=body, timeout=3)
        wait_for(lambda: "has blocked" in process.said(), process)
        said = process.said()
        assert "multi_turn_scheduler 'sleeper' has blocked the event loop for 10 s" in said
        assert f"{tmp_path}/sleeper.py:18: time.sleep(1000)" in said
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=HANG_S)
        assert process.returncode == 130
    assert said.splitlines()[-2:] == [
        "stopped while multi_turn_scheduler 'sleeper' blocked the event loop",
        f"  {tmp_path}/sleeper.py:18: time.sleep(1000)",
    ]
    left = Path(f"/proc/{(tmp_path / 'left').read_text()}/cmdline")
    assert not left.exists() or not left.read_bytes()  # a zombie has no command line


@pytest.mark.parametrize("kind", ["nothing there", "no model"])
def test_a_model_that_is_none_is_told(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    if kind == "no model":
        folder.mkdir()
    code, said = fails(tmp_path, folder, "--port", "0")
    assert code == 2 and said.startswith(f"error: --model {folder} "), said
    assert "Traceback" not in said


def test_a_port_in_use_is_told_before_a_model_is_loaded(tiny_dir: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = fails(tmp_path, tiny_dir, "--port", str(port))
    assert code == 1 and f"--port {port} cannot be used: Address already in use" in said
    assert len(said.splitlines()) == 1


def ignoring(function: Any) -> Any:
    def call(*args: Any, **options: Any) -> None:
        with suppress(httpx.HTTPError):
            function(*args, **options)

    return call


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_the_server_also_while_it_generates(
    tiny_dir: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with command(tmp_path, tiny_dir, "--max-model-len", "200000") as (process, url):
        assert httpx.get(f"{url}/health", timeout=HANG_S).json() == {"status": "ok"}
        body = {"prompt": "a", "max_tokens": 200_000, "ignore_eos": True}
        ask = Thread(
            target=ignoring(httpx.post), args=[f"{url}/v1/completions"], kwargs={"json": body}
        )
        ask.start()
        while not httpx.get(f"{url}/engine/health", timeout=HANG_S).json()["running"]:
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait() == code
        ask.join()
        assert process.communicate()[1].strip().splitlines()[-1] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=needs_vllm)])
def test_a_run_over_a_server_trains_and_ends(tmp_path: Path, engine: str) -> None:
    config = small_config(tmp_path)
    make_model(tmp_path / "model", max_len=256, head_dim=32)
    flags = ["--engine", engine, "--max-model-len", "128"]
    with command(tmp_path, tmp_path / "model", *flags) as (server, url):
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "model": "m"}
        asked = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=HANG_S)
        assert 1 <= asked.json()["usage"]["completion_tokens"] <= 4, asked.text
        config["explorer"]["rollout_model"] = {"engine_type": "remote", "base_urls": [url]}
        ended = run(tmp_path, config)
        assert ended.returncode == 0, ended.stderr
        assert httpx.get(f"{url}/engine/health", timeout=HANG_S).json()["version"] >= 3
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=HANG_S)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_run_whose_server_dies_ends_with_one_sentence(
    tmp_path: Path, number: signal.Signals
) -> None:
    config = small_config(tmp_path)
    config["buffer"]["total_steps"] = 10_000
    config["explorer"] |= {"max_timeout": 8, "max_retry_times": 0}
    with command(tmp_path, tmp_path / "model", "--max-model-len", "128") as (server, url):
        config["explorer"]["rollout_model"] = {"engine_type": "remote", "base_urls": [url]}
        process = started(tmp_path, config)
        try:
            while httpx.get(f"{url}/engine/health", timeout=HANG_S).json()["version"] < 2:
                assert process.poll() is None, process.said()
            server.send_signal(number)
            _, said = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
        assert process.returncode == 1
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, said
        assert url in errors[0] or "took longer than explorer.max_timeout" in errors[0], said


@pytest.mark.extension("sql")
@pytest.mark.slow
def test_with_a_limit_of_staleness_a_server_may_die_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    """Each of 24 x 16 rollouts is there once, and is trained or dropped as stale; metrics lack what
    is dropped after the last train step.
    """
    config = small_config(tmp_path)
    config["buffer"] |= {"total_steps": 24, "train_batch_size": 16}
    store = {"name": "shared", "storage_type": "sql", "path": "shared.db"}
    config["buffer"]["trainer_input"] = {"experience_buffer": store}
    config["algorithm"] |= {
        "sample_strategy": "staleness_control", "sample_strategy_args": {"max_staleness": 1}
    }  # fmt: skip
    config["synchronizer"] = {"sync_style": "fully_async"}
    server = partial(command, tmp_path, tmp_path / "model", "--max-model-len", "128")
    with server() as (first, url):
        config["explorer"]["rollout_model"] = {"engine_type": "remote", "base_urls": [url]}
        process = started(tmp_path, config)
        try:
            while httpx.get(f"{url}/engine/health", timeout=HANG_S).json()["version"] < 5:
                assert process.poll() is None, process.said()
            first.send_signal(signal.SIGKILL)
            _, said = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
        assert process.returncode == 1
        assert re.search(rf"^error: .*{url} is gone \(.*\): \S", said, re.M), said
    with server(port=int(url.rpartition(":")[2])) as (_, again):
        assert again == url
        ended = run(tmp_path, config)
    assert ended.returncode == 0, ended.stderr
    job = tmp_path / "checkpoints/tests/job"
    with sqlite3.connect(job / "buffer" / "shared.db") as database:
        query = "SELECT batch, count(DISTINCT msg_id), sum(consumed) FROM shared GROUP BY batch"
        assert database.execute(query).fetchall() == [(step, 16, 16) for step in range(1, 25)]
    steps = metrics(job, "trainer")
    trained = sum(step["perf/experiences"] for step in steps)
    dropped = sum(step["sample/dropped_stale"] for step in steps)
    assert max(step["rollout/staleness_max"] for step in steps) <= 1
    assert trained > 0 and trained + dropped <= 24 * 16

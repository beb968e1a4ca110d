"""`trireme run` with engines in processes of their own: learns, proves every sync, and ends when an
engine does.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.e2e.job import run, small_config, started, wait_for
from tests.limits import HANG_S
from tests.tiny import make_model
from tests.vllm import needs_vllm
from trireme.cli.main import app
from trireme.ext.remote.engine import RemoteEngine
from trireme.monitor.monitor import read_metrics

VLLM = {"engine_type": "vllm", "enable_prefix_caching": True}
TORCH = {"engine_type": "torch", "engine_num": 2}
pytestmark = pytest.mark.slow


def job(folder: Path, engine: dict[str, Any], **sync: Any) -> dict[str, Any]:
    config = small_config(folder)
    make_model(folder / "model", max_len=256, head_dim=32)
    config["explorer"]["rollout_model"] = engine
    config["synchronizer"] = {"sync_method": "nccl", **sync}
    return config


def scalars(folder: Path, name: str) -> list[float]:
    """All values of a metric."""
    rows = read_metrics(folder / "checkpoints/tests/job/monitor/metrics.jsonl")
    return [row["metrics"][name] for row in rows if name in row["metrics"]]


@pytest.mark.parametrize(
    ("engine", "style"),
    [
        pytest.param(VLLM, "fixed", marks=needs_vllm),
        pytest.param(VLLM, "fully_async", marks=needs_vllm),
        (TORCH, "fixed"),
    ],
)
def test_weights_reach_engines_of_other_processes(
    tmp_path: Path, engine: dict[str, Any], style: str
) -> None:
    done = run(tmp_path, job(tmp_path, engine, sync_style=style))
    assert done.returncode == 0, done.stderr
    differences = scalars(tmp_path, "sync/probe_diff")
    assert len(differences) == 4 and max(differences) < 1e-4
    assert max(scalars(tmp_path, "sync/version")) == 4
    recorded = scalars(tmp_path, "rollout/logprob_diff_max")
    assert recorded and (style != "fixed" or max(recorded) < 1e-4)


def test_engines_that_loaded_the_model_are_sent_no_weights_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[int] = []
    commit = RemoteEngine.commit_weights

    async def noted(engine: RemoteEngine, version: int, **source: str) -> None:
        versions.append(version)
        await commit(engine, version, **source)

    monkeypatch.setattr(RemoteEngine, "commit_weights", noted)
    config = job(tmp_path, TORCH, sync_method="memory")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(app, ["run", "--config", str(tmp_path / "config.yaml")])
    assert done.exit_code == 0, done.output
    assert versions == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        pytest.param(VLLM, "nccl", marks=needs_vllm),
        (TORCH, "nccl"),
        pytest.param(TORCH, "memory", marks=pytest.mark.large),
    ],
)
def test_an_adapter_alone_reaches_engines_of_other_processes_also_after_a_resume(
    tmp_path: Path, engine: dict[str, Any], method: str
) -> None:
    config = job(tmp_path, engine, sync_method=method)
    config["model"]["lora_configs"] = [{"lora_rank": 4, "use_rslora": True}]
    config["algorithm"]["optimizer"] = {"lr": 1e-2}
    for steps in (2, 4):
        done = run(tmp_path, config, f"buffer.total_steps={steps}")
        assert done.returncode == 0, done.stderr
    assert max(scalars(tmp_path, "sync/version")) == 4
    assert max(scalars(tmp_path, "sync/probe_diff")) < 1e-4
    assert max(scalars(tmp_path, "rollout/logprob_diff_max")) < 1e-4
    adapter = tmp_path / "checkpoints/tests/job/global_step_4/actor/lora_adapter"
    size = sum(t.nbytes for t in load_file(adapter / "adapter_model.safetensors").values())
    assert set(scalars(tmp_path, "sync/pushed_bytes")) == {size}


@pytest.mark.gpu
@needs_vllm
def test_weights_reach_vllm_over_nccl_in_bfloat16(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: the trainer's and the engine's")
    done = run(tmp_path, job(tmp_path, VLLM), "cluster.launcher=local")
    assert done.returncode == 0, done.stderr
    assert max(scalars(tmp_path, "sync/version")) == 4
    assert max(scalars(tmp_path, "sync/probe_mean")) < 0.1


@pytest.mark.gpu
@needs_vllm
@pytest.mark.parametrize("level", [1, 2])
def test_vllm_sleeps_while_the_trainer_has_the_gpu(tmp_path: Path, level: int) -> None:
    asked = f"explorer.rollout_model.sleep_level={level}"
    done = run(tmp_path, job(tmp_path, VLLM) | {"mode": "colocate"}, asked)
    assert done.returncode == 0, done.stderr
    assert max(scalars(tmp_path, "sync/probe_mean")) < 0.1
    log = (tmp_path / "checkpoints/tests/job/log/engine_0.log").read_text()
    assert "not supported" not in log and log.count("to fall asleep") >= 4


@needs_vllm
def test_vllm_and_the_trainer_take_turns_on_one_device(tmp_path: Path) -> None:
    config = job(tmp_path, VLLM) | {"mode": "colocate"}
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stderr
    assert max(scalars(tmp_path, "sync/version")) == 4
    assert max(scalars(tmp_path, "sync/probe_diff")) < 1e-4
    assert max(scalars(tmp_path, "rollout/logprob_diff_max")) < 1e-4
    log = (tmp_path / "checkpoints/tests/job/log/engine_0.log").read_text()
    assert log.count("to fall asleep") >= 4 and log.count("to wake up") >= 4


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        (TORCH, "nccl"),
        pytest.param(TORCH, "checkpoint", marks=pytest.mark.large),
        pytest.param(VLLM, "nccl", marks=needs_vllm),
    ],
)
def test_an_engine_that_is_killed_is_started_again_and_nothing_is_lost(
    tmp_path: Path, engine: dict[str, Any], method: str
) -> None:
    """Killed while it generates: each of 12 x 4 x 4 rollouts is there once, by proved weights."""
    survives_a_killed_engine(tmp_path, job(tmp_path, engine, sync_method=method))


def survives_a_killed_engine(tmp_path: Path, config: dict[str, Any]) -> None:
    """A run one of whose engines is killed has each rollout once, by proved weights."""
    config["buffer"]["total_steps"] = 12
    config["model"]["max_response_tokens"] = 64
    going = started(tmp_path, config)
    log = tmp_path / "checkpoints/tests/job/log/trainer.log"
    try:
        wait_for(lambda: log.exists() and "saved" in log.read_text(), going)
        os.kill(engines_of(going.pid)[0], signal.SIGKILL)
        _, said = going.communicate(timeout=HANG_S)
    finally:
        going.kill()
    assert going.returncode == 0, said
    assert "has ended by signal 9: it is started again (1 of 3)" in said
    store = tmp_path / "checkpoints/tests/job/buffer/experience_buffer.jsonl"
    made = [json.loads(line) for line in store.read_text().splitlines()]
    assert len({str(row["eid"]) for row in made}) == len(made) == 12 * 4 * 4
    assert sum(scalars(tmp_path, "rollout/failed")) == 0
    assert max(scalars(tmp_path, "sync/probe_diff")) < 1e-4
    assert max(scalars(tmp_path, "rollout/logprob_diff_max")) < 1e-4
    assert max(scalars(tmp_path, "sync/version")) in (12, 13)  # a push was under way, or not


def test_an_engine_that_is_killed_too_often_ends_the_run_with_its_name(tmp_path: Path) -> None:
    config = job(tmp_path, TORCH)
    config["cluster"] = {"engine_restarts": 1}
    config["buffer"]["total_steps"] = 100_000
    config["buffer"]["total_epochs"] = 100_000
    going = started(tmp_path, config)
    log = tmp_path / "checkpoints/tests/job/log/trainer.log"
    try:
        wait_for(lambda: log.exists() and "saved" in log.read_text(), going)
        first, second = engines_of(going.pid)
        os.kill(first, signal.SIGKILL)
        (again,) = wait_for(lambda: set(engines_of(going.pid)) - {first, second}, going)
        os.kill(again, signal.SIGKILL)
        _, said = going.communicate(timeout=HANG_S)
    finally:
        going.kill()
    assert going.returncode == 1
    assert "of 2 has ended by signal 9, and cluster.engine_restarts (1) is used up" in said
    assert not Path(f"/proc/{second}").exists(), "the other engine ends with the run"


def test_engines_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    config = job(tmp_path, TORCH)
    going = started(tmp_path, config)
    deadline = time.monotonic() + HANG_S
    while len(found := engines_of(going.pid)) < 2:
        assert time.monotonic() < deadline and going.poll() is None
        time.sleep(0.1)
    going.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in found):
        assert time.monotonic() < deadline, "an engine was left behind"
        time.sleep(0.2)


def engines_of(parent: int) -> list[int]:
    """Engine processes that `parent` has started."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            ppid = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if ppid == parent and b"trireme.ext.http.process" in words:
            found.append(int(place.name))
    return sorted(found)

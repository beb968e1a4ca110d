"""`mode: colocate` on two places: the weights of one process, also after a rank has died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.job import run, small_config, wait_for
from tests.e2e.test_modes import metrics
from tests.ext.ray.clusters import JOB, dies, ended, kill, nobody_left, start, where
from tests.ext.ray.test_runs import difference
from tests.hybrids import make_hybrid
from tests.tiny import make_model
from tests.vllm import needs_vllm
from trireme.checkpoint.layout import JobFolder

pytest.importorskip("ray")

pytestmark = pytest.mark.slow
PLACES = ("mode=colocate", "cluster.launcher=ray", "cluster.gpu_per_node=2")
PARKED = "trainer.park_optimizer=true"


class Own:
    """A cluster that the run starts itself."""

    address = "local"


def proved(job: Path, pushes: int) -> None:
    """Fingerprints of both engines were the trainer's after every push, else the run had ended."""
    trained = metrics(job, "trainer")
    assert f"version {pushes}: the weights of" in (job / "log/synchronizer.log").read_text()
    assert max(row["rollout/logprob_diff_max"] for row in trained) < 1e-4


@pytest.mark.large
def test_two_pairs_learn_what_one_process_does_also_after_a_rank_has_died(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "pairs").mkdir()
    asked = ("buffer.total_steps=6", "explorer.eval_interval=6")
    alone, job = tmp_path / "alone" / JOB, tmp_path / "pairs" / JOB

    def begin() -> Any:
        return start(tmp_path / "pairs", Own, *asked, *PLACES, PARKED)

    process = begin()
    wait_for((job / "global_step_2/manifest.json").exists, process)
    pid, _ = where(job / "log/launcher.log", "trainer_rank_1")
    dies(process, "trainer_rank_1", lambda: kill(pid))
    assert nobody_left(tmp_path / "pairs") and JobFolder(job).steps()[-1] < 6
    stdout, _ = ended(begin())
    assert "resuming from" in stdout and nobody_left(tmp_path / "pairs")
    done = run(tmp_path / "alone", small_config(tmp_path / "alone"), *asked)
    assert done.returncode == 0, done.stderr
    assert difference(job, alone, 6) < 1e-5
    proved(job, 6)


@pytest.mark.large
def test_two_pairs_learn_with_a_hybrid(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config["model"]["model_path"] = str(make_hybrid(tmp_path / "hybrid", "qwen3_5_text"))
    done = run(tmp_path, config, *PLACES, "buffer.total_steps=2", "explorer.eval_interval=2")
    assert done.returncode == 0, done.stderr
    proved(tmp_path / JOB, 2)


@needs_vllm
def test_two_vllm_sleep_in_turns_with_the_ranks(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    make_model(tmp_path / "model", max_len=256, head_dim=32)
    config["explorer"]["rollout_model"] = {"engine_type": "vllm"}
    done = run(tmp_path, config, *PLACES, "buffer.total_steps=2")
    assert done.returncode == 0, done.stderr
    proved(tmp_path / JOB, 2)
    log = (tmp_path / JOB / "log/engine_1.log").read_text()
    assert log.count("to fall asleep") >= 2
    assert (
        log.count("to wake up tags ['weights']") == log.count("to wake up tags ['kv_cache']") == 2
    )


@pytest.mark.gpu
@needs_vllm
def test_ranks_lend_vllm_their_gpus_memory_and_it_sleeps_in_turns(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, each a rank's and an engine's")
    config = small_config(tmp_path)
    make_model(tmp_path / "model", max_len=256, head_dim=64)
    config["explorer"]["rollout_model"] = {"engine_type": "vllm"}
    done = run(tmp_path, config, *PLACES, PARKED)
    assert done.returncode == 0, done.stderr
    for index in range(2):
        log = (tmp_path / JOB / f"log/engine_{index}.log").read_text()
        assert "not supported" not in log and log.count("to fall asleep") >= 4
        assert log.count("to wake up tags ['weights']") == 4

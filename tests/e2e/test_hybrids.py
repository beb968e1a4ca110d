"""Whole runs of hybrids: killed and resumed by bytes, with an adapter, and sampled exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import run, small_config, started
from tests.e2e.test_engine_processes import VLLM, scalars
from tests.ext.vllm.test_hybrids import WIDE
from tests.hybrids import make_hybrid
from tests.tested import HYBRIDS, RESUME, families
from tests.vllm import needs_vllm

FOLDER = "checkpoints/tests/job"


def config_of(folder: Path, family: str, **changed: Any) -> dict[str, Any]:
    folder.mkdir()
    config = small_config(folder)
    config["model"]["model_path"] = str(make_hybrid(folder / "hybrid", family, **changed))
    config["trainer"]["save_interval"] = 1
    return config


def gaps(folder: Path) -> list[float]:
    """The largest difference between engine and trainer in each step, in nats."""
    lines = (folder / FOLDER / "monitor/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["metrics"] for line in lines]
    return [row[name] for row in rows if (name := "rollout/logprob_diff_max") in row]


@pytest.mark.parametrize("family", families(RESUME, HYBRIDS))
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path, family: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run(whole, config_of(whole, family))
    assert done.returncode == 0, done.stdout + done.stderr
    config = config_of(killed, family)
    started(killed, config).kill_when(killed / FOLDER / "global_step_2")
    done = run(killed, config)
    assert done.returncode == 0, done.stdout + done.stderr
    file = f"{FOLDER}/global_step_4/actor/huggingface/model.safetensors"
    assert (whole / file).read_bytes() == (killed / file).read_bytes()
    assert len(gaps(whole)) == 4 and max(gaps(whole)) < 1e-4


def test_an_adapter_and_a_critic_are_trained_on_a_hybrid(tmp_path: Path) -> None:
    """PPO with LoRA: a policy, its base as reference, and a critic of the same kind of layers."""
    config = config_of(tmp_path / "job", "lfm2")
    config["algorithm"] |= {"algorithm_type": "ppo", "kl_loss_fn": "k2"}
    config["model"]["lora_configs"] = [{"lora_rank": 4, "lora_alpha": 8}]
    config["buffer"]["total_steps"] = 2
    done = run(tmp_path / "job", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(gaps(tmp_path / "job")) < 1e-4


STORES: dict[str, dict[str, Any]] = {
    "sql": {"storage_type": "sql"},
    "replay": {
        "replay_buffer": {
            "enable": True,
            "reuse_cooldown_time": 0.01,
            "priority_fn": "decay_limit_randomization",
            "priority_fn_args": {"use_count_limit": 2},
        }
    },
}


@pytest.mark.parametrize(("family", "store"), [("lfm2", "sql"), ("qwen3_5_text", "replay")])
def test_a_hybrid_learns_from_every_store(tmp_path: Path, family: str, store: str) -> None:
    config = config_of(tmp_path / "job", family)
    config["buffer"]["trainer_input"] = {"experience_buffer": {"name": "own", **STORES[store]}}
    done = run(tmp_path / "job", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(gaps(tmp_path / "job")) < 1e-4  # of samples by the newest weights
    assert (max(scalars(tmp_path / "job", "rollout/staleness_max")) > 0) == (store == "replay")


@pytest.mark.slow
@needs_vllm
def test_vllm_and_the_trainer_of_a_hybrid_take_turns_on_one_device(tmp_path: Path) -> None:
    config = config_of(tmp_path / "job", "lfm2", **WIDE)
    config["mode"] = "colocate"
    config["explorer"]["rollout_model"] = VLLM
    done = run(tmp_path / "job", config, "buffer.total_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(gaps(tmp_path / "job")) < 1e-4
    assert max(scalars(tmp_path / "job", "sync/probe_diff")) < 1e-4


def test_sequence_parallel_ranks_are_refused_with_a_sentence(tmp_path: Path) -> None:
    config = config_of(tmp_path / "job", "lfm2")
    config["trainer"]["ulysses_sequence_parallel_size"] = 2
    done = run(tmp_path / "job", config)
    assert done.returncode != 0
    assert "expected 1, since layers of this model have a state" in done.stdout + done.stderr

"""A mixture of experts through the command line: it learns and is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.job import run, small_config, started, weights
from tests.e2e.test_modes import metrics
from tests.tiny import make_model
from tests.vllm import needs_vllm


@pytest.mark.parametrize(("arch", "router"), [("qwen3_moe", "mlp.gate"), ("gpt_oss", "mlp.router")])
def test_a_mixture_learns_what_its_engine_samples_and_is_exported(
    tmp_path: Path, arch: str, router: str
) -> None:
    config = small_config(tmp_path)
    before = make_model(tmp_path / "mixture", arch, max_len=256)
    config["model"]["model_path"] = str(before)
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    job = tmp_path / "checkpoints/tests/job"
    lines = map(json.loads, (job / "monitor/metrics.jsonl").read_text().splitlines())
    name = "rollout/logprob_diff_max"
    gaps = [line["metrics"][name] for line in lines if name in line["metrics"]]
    assert len(gaps) == 4 and 0 <= max(gaps) < 1e-5
    old, new = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (before, job / "global_step_4/actor/huggingface")
    )
    moved = [name for name in old if not torch.equal(old[name], new[name])]
    assert set(old) == set(new) and any(".experts." in n for n in moved)
    assert any(name.endswith(f"{router}.weight") for name in moved)
    sinks = [name for name in moved if name.endswith(".sinks")]
    assert len(sinks) == (2 if arch == "gpt_oss" else 0)


def replaying(folder: Path) -> dict[str, Any]:
    """A small run of a mixture that trains with the experts of its engine."""
    config = small_config(folder)
    config["model"]["model_path"] = str(make_model(folder / "mixture", "qwen3_moe", max_len=256))
    config["algorithm"]["enable_router_replay"] = True
    return config


def test_a_run_with_replay_trains_by_recorded_experts_and_resumes_to_the_same_weights(
    tmp_path: Path,
) -> None:
    config = replaying(tmp_path)
    for name in ("one", "other"):
        done = run(tmp_path, config, f"name={name}")
        assert done.returncode == 0, done.stdout + done.stderr
    started(tmp_path, config).kill_when(tmp_path / "checkpoints/tests/job/global_step_2")
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = [tmp_path / "checkpoints/tests" / name for name in ("one", "other", "job")]
    assert len({weights(job, 4) for job in jobs}) == 1
    rows = [row for row in metrics(jobs[0], "trainer") if "actor/loss" in row]
    assert [row["rollout/routing_recorded"] for row in rows] == [1.0] * 4
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-5


@pytest.mark.large
def test_engines_in_processes_of_their_own_send_recorded_experts(tmp_path: Path) -> None:
    config = replaying(tmp_path)
    config["explorer"]["rollout_model"] = {"engine_type": "torch", "engine_num": 2}
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "checkpoints/tests/job", "trainer")
    shares = [row["rollout/routing_recorded"] for row in rows if "actor/loss" in row]
    assert shares == [1.0] * 4


@needs_vllm
@pytest.mark.slow
def test_vllm_sends_recorded_experts(tmp_path: Path) -> None:
    config = replaying(tmp_path)
    make_model(tmp_path / "mixture", "qwen3_moe", max_len=256, head_dim=32)
    config["explorer"]["rollout_model"] = {"engine_type": "vllm", "enable_prefix_caching": True}
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "checkpoints/tests/job", "trainer")
    trained = [row for row in rows if "actor/loss" in row]
    assert [row["rollout/routing_recorded"] for row in trained] == [1.0] * 4
    assert max(row["rollout/logprob_diff_max"] for row in trained) < 1e-4


def test_two_commands_hand_recorded_experts_on_through_a_database(tmp_path: Path) -> None:
    config = replaying(tmp_path)
    store = {"storage_type": "sql", "name": "shared"}
    config["buffer"]["train_batch_size"] = 16
    config["buffer"]["trainer_input"] = {"experience_buffer": store}
    both = []
    for mode in ("explore", "train"):
        (tmp_path / mode).mkdir()
        both.append(started(tmp_path / mode, config, f"mode={mode}"))
    for one in both:
        one.ends_well()
    rows = metrics(tmp_path / "checkpoints/tests/job", "trainer")
    shares = [row["rollout/routing_recorded"] for row in rows if "actor/loss" in row]
    assert shares == [1.0] * 4


def test_without_a_mixture_replay_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, small_config(tmp_path), "algorithm.enable_router_replay=true")
    assert done.returncode != 0 and "is no mixture of experts: expected false" in done.stderr

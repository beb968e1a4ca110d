"""Whole runs with LoRA whose engine reads the trainer's base: they learn as with merged weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.composites import make_composite
from tests.e2e.job import run, small_config, started, weights, write_jsonl

FOLDER = "checkpoints/tests/job"
ADDS = "explorer.rollout_model.enable_lora=true"


def config_of(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    config = small_config(folder)
    config["model"]["lora_configs"] = [{"lora_rank": 4, "lora_alpha": 8}]
    config["trainer"]["save_interval"] = 1
    config["algorithm"]["kl_loss_fn"] = "k2"  # its reference is the base without the adapter
    return config


def metric(folder: Path, name: str) -> list[float]:
    lines = (folder / FOLDER / "monitor/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["metrics"] for line in lines]
    return [row[name] for row in rows if name in row]


def test_equal_seeds_give_equal_weights_killed_or_not_and_both_sides_agree(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run(whole, config_of(whole), ADDS)
    assert done.returncode == 0, done.stdout + done.stderr
    config = config_of(killed)
    started(killed, config, ADDS).kill_when(killed / FOLDER / "global_step_2")
    done = run(killed, config, ADDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(whole / FOLDER, 4) == weights(killed / FOLDER, 4)
    assert len(gaps := metric(whole, "rollout/logprob_diff_max")) == 4 and max(gaps) < 1e-5
    kl = metric(whole, "actor/kl_loss")
    assert kl[0] == 0 and max(kl) > 0


def test_a_version_samples_its_own_tokens_while_the_next_one_is_trained(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    done = run(folder, config_of(folder), ADDS, "synchronizer.sync_style=fully_async")
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(metric(folder, "sync/probe_diff")) < 1e-5
    same = metric(folder, "rollout/logprob_diff_max")  # of tokens that the newest weights sampled
    assert same and max(same) < 1e-4


@pytest.mark.parametrize("given", [[], ["mode=colocate"]])
def test_a_composite_shares_its_towers_too(tmp_path: Path, given: list[str]) -> None:
    folder = tmp_path / "job"
    config = config_of(folder)
    config["model"]["model_path"] = str(make_composite(folder / "sees", "gemma3"))
    done = run(folder, config, ADDS, "buffer.total_steps=2", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(metric(folder, "rollout/logprob_diff_max")) < 1e-4


def test_a_supervised_run_is_evaluated_as_with_merged_weights(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    config = config_of(folder)
    pairs = [{"prompt": f"What is {n}?", "response": "seven"} for n in range(8)]
    data = write_jsonl(folder / "data" / "sft.jsonl", pairs)
    config["algorithm"] = {"algorithm_type": "sft", "optimizer": {"lr": 0.02}}
    form = {"prompt_type": "plaintext", "prompt_key": "prompt", "response_key": "response"}
    store = {"name": "pairs", "storage_type": "file", "path": str(data), "format": form}
    config["buffer"]["trainer_input"] = {"experience_buffer": store}
    del config["buffer"]["explorer_input"]["taskset"]
    config["mode"] = "train"
    config["buffer"]["train_batch_size"] = 8
    config["trainer"]["save_interval"] = 4
    ends = []
    for name, added in (("merged", "false"), ("added", "true")):
        done = run(folder, config, f"name={name}", f"explorer.rollout_model.enable_lora={added}")
        assert done.returncode == 0, done.stdout + done.stderr
        summary = folder / "checkpoints/tests" / name / "summary.json"
        ends.append(json.loads(summary.read_text())["evaluations"]["run"])
    assert ends[0] == ends[1] and ends[0]["first"] != ends[0]["last"]

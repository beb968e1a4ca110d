"""Same seed, same weights; killed and resumed, same weights, nothing lost or doubled."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.job import run, run_fresh, small_config, started, weights
from tests.tiny import make_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A run that nobody interrupted, with another hash seed than the others: its folder and its
    final weights.
    """
    folder = tmp_path_factory.mktemp("whole")
    done = run_fresh(folder, small_config(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    job = folder / "checkpoints/tests/job"
    return job, weights(job, 4)


def test_equal_seeds_give_byte_identical_weights(tmp_path: Path, whole: tuple[Path, bytes]) -> None:
    config = small_config(tmp_path)
    assert run(tmp_path, config).returncode == 0
    assert weights(tmp_path / "checkpoints/tests/job", 4) == whole[1]
    assert run(tmp_path, config, "seed=7", "name=other").returncode == 0
    assert weights(tmp_path / "checkpoints/tests/other", 4) != whole[1]


def test_two_threads_give_byte_identical_weights_too(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    two = {"OMP_NUM_THREADS": "2"}
    done = run_fresh(tmp_path, config, "name=one", **two)
    assert done.returncode == 0, done.stderr
    threads = partial(torch.set_num_threads, 2)  # torch, loaded already, has read the variable
    started(tmp_path, config, "name=other", variables=two, prepare=threads).ends_well()
    one, other = (weights(tmp_path / "checkpoints/tests" / name, 4) for name in ("one", "other"))
    assert one == other


@pytest.mark.parametrize("moment", ["global_step_2", "monitor/metrics.jsonl"])
def test_a_killed_run_resumes_to_the_same_weights(
    tmp_path: Path, whole: tuple[Path, bytes], moment: str
) -> None:
    config = small_config(tmp_path)
    job = tmp_path / "checkpoints/tests/job"
    started(tmp_path, config).kill_when(job / moment)
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(job, 4) == whole[1]
    eids = Counter(line["eid"] for line in lines_of(job))
    assert len(eids) == 4 * 4 * 4 and set(eids.values()) == {1}
    with sqlite3.connect(job / "buffer/explorer_output.db") as database:
        [(count,)] = database.execute("select count(*) from experiences")
    assert count == 4 * 4 * 4


@pytest.mark.parametrize("storage", ["queue", "sql"])
def test_a_damaged_checkpoint_is_passed_by_and_its_step_made_again(
    tmp_path: Path, whole: tuple[Path, bytes], storage: str
) -> None:
    config = small_config(tmp_path)
    config["buffer"]["trainer_input"] = {
        "experience_buffer": {"name": "shared", "storage_type": storage}
    }
    assert run(tmp_path, config).returncode == 0
    job = tmp_path / "checkpoints/tests/job"
    damaged = job / "global_step_4/actor/huggingface/model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is damaged and passed by" in done.stdout + done.stderr
    assert weights(job, 4) == whole[1]


def test_metrics_say_that_engine_and_trainer_agree(whole: tuple[Path, bytes]) -> None:
    rows = [json.loads(line) for line in (whole[0] / "monitor/metrics.jsonl").open()]
    trained = [row["metrics"] for row in rows if row["part"] == "trainer"]
    assert len(trained) == 4
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in trained)
    assert all(row["rollout/staleness_max"] == 0 for row in trained)
    explored = [row["metrics"] for row in rows if row["part"] == "explorer"]
    assert [row["rollout/experiences"] for row in explored] == [16] * 4


def lines_of(job: Path) -> list[dict[str, Any]]:
    """The copy of its experiences."""
    text = (job / "buffer/experience_buffer.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def check_that_a_killed_run_ends_alike(
    tmp_path: Path, make: Callable[[Path], dict[str, Any]]
) -> None:
    """Whatever gives the rewards, a killed run resumes to the same weights."""
    config = make(tmp_path)
    for name in ("whole", "killed"):
        words = (f"name={name}", "buffer.total_steps=3", "trainer.save_interval=1")
        job = tmp_path / "checkpoints/tests" / name
        if name == "killed":
            started(tmp_path, config, *words).kill_when(job / "global_step_1/manifest.json")
        started(tmp_path, config, *words).ends_well()
    whole, killed = (tmp_path / "checkpoints/tests" / name for name in ("whole", "killed"))
    assert weights(whole, 3) == weights(killed, 3)
    learned, again = (
        {line["eid"]: line["reward"] for line in lines_of(job)} for job in (whole, killed)
    )
    assert learned == again and len(learned) == 48 and len(set(learned.values())) > 2


@pytest.mark.parametrize("adapts", [False, True])
def test_a_killed_run_of_a_model_with_attention_sinks_resumes_to_the_same_weights(
    tmp_path: Path, adapts: bool
) -> None:
    def of_gpt_oss(folder: Path) -> dict[str, Any]:
        config = small_config(folder)
        config["model"]["model_path"] = str(make_model(folder / "sinks", "gpt_oss", max_len=256))
        if adapts:
            lora = {"name": "a", "lora_rank": 4, "target_modules": ["q_proj", "v_proj", "o_proj"]}
            config["model"]["lora_configs"] = [lora]
        return config

    check_that_a_killed_run_ends_alike(tmp_path, of_gpt_oss)


STORE = "buffer.trainer_input.experience_buffer"
VARIANTS = {
    "sql": f"{STORE}.storage_type=sql",
    "replay": f"{STORE}.replay_buffer={{enable: true}}",
    "lora": "model.lora_configs=[{name: a, lora_rank: 4}]",
}


@pytest.mark.large
@pytest.mark.parametrize("variant", VARIANTS)
def test_three_runs_and_three_killed_ones_end_with_the_same_bytes(
    tmp_path: Path, variant: str
) -> None:
    config = small_config(tmp_path)
    config["buffer"]["total_steps"] = 12
    config["explorer"]["eval_interval"] = 100
    found: dict[str, str] = {}
    moments = ("global_step_2", "global_step_6", "global_step_10")
    for name in ("a", "b", "c", *moments):
        words = (VARIANTS[variant], f"name={name}")
        job = tmp_path / "checkpoints/tests" / name
        if name in moments:
            started(tmp_path, config, *words).kill_when(job / name)
            assert not (job / "global_step_12").exists()
        if name == "c":  # with another hash seed
            done = run_fresh(tmp_path, config, *words)
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            started(tmp_path, config, *words).ends_well()
        found[name] = hashlib.sha256(weights(job, 12)).hexdigest()[:16]
        print(f"{variant:<8}{name:<16}{found[name]}", flush=True)
    assert len(set(found.values())) == 1, found

"""Styles, methods and modes: each runs to its end, and weights really travel."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.job import run, small_config, started, write_jsonl
from trireme.checkpoint.layout import JobFolder

VARIANTS = {
    "lora": ["model.lora_configs=[{name: a, lora_rank: 4}]", "algorithm.optimizer.lr=1e-2"],
    "files": ["synchronizer.sync_method=checkpoint"],
    "interval": ["synchronizer.sync_interval=2"],
    "offset": ["synchronizer.sync_offset=1"],
    "explorer_driven": ["synchronizer.sync_style=dynamic_by_explorer"],
    "trainer_driven": ["synchronizer.sync_style=dynamic_by_trainer"],
    "fully_async": [
        "synchronizer.sync_style=fully_async",
        "algorithm.sample_strategy=staleness_control",
        "algorithm.sample_strategy_args={max_staleness: 8}",
    ],
    "replay": ["buffer.trainer_input.experience_buffer.replay_buffer.enable=true"],
    "sql": ["buffer.trainer_input.experience_buffer.storage_type=sql"],
    "reference": [
        "algorithm.kl_loss_fn=k3",
        "algorithm.kl_loss_fn_args={kl_coef: 0.01}",
        "trainer.enable_gradient_checkpointing=true",
    ],
}


def metrics(job: Path, part: str, explorer: str = "") -> list[dict[str, Any]]:
    """What a part reported, step by step; `explorer`: of the one of that name."""
    path = job / "monitor" / explorer / "metrics.jsonl"
    rows = [json.loads(line) for line in path.open()]
    return [row["metrics"] for row in rows if row["part"] == part]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_runs_to_its_end_and_engine_and_trainer_agree(
    tmp_path: Path, variant: str
) -> None:
    done = run(tmp_path, small_config(tmp_path), *VARIANTS[variant])
    assert done.returncode == 0, done.stdout + done.stderr
    job = tmp_path / "checkpoints/tests/job"
    trained, explored = metrics(job, "trainer"), metrics(job, "explorer")
    assert len(trained) == 4 and len(explored) == 4
    assert sum(row["perf/experiences"] for row in trained) == 64
    name = "rollout/logprob_diff_max"  # absent where the trainer is ahead of the engine
    differences = [row[name] for row in trained if name in row]
    assert differences and max(differences) < 1e-4
    assert explored[-1]["sync/version"] >= 1
    if variant == "offset":
        assert [row["rollout/staleness_max"] for row in trained] == [0, 1, 1, 1]
    if variant == "reference":
        assert trained[-1]["actor/kl_loss"] > 0


def test_lora_saves_the_merged_model_and_leaves_the_base_alone(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    before = load_file(tmp_path / "model/model.safetensors")
    done = run(tmp_path, config, *VARIANTS["lora"])
    assert done.returncode == 0, done.stderr
    told = re.findall(r"LoRA: trainable [\d,]+ of [\d,]+ parameters \(\d+\.\d\d%\)", done.stdout)
    assert len(told) == 1, done.stdout
    assert told[0] in (tmp_path / "checkpoints/tests/job/log/trainer.log").read_text()
    folder = tmp_path / "checkpoints/tests/job/global_step_4/actor/huggingface"
    merged = load_file(folder / "model.safetensors")
    assert set(merged) == set(before)
    changed = [name for name in before if not merged[name].equal(before[name])]
    assert changed and all("proj" in name for name in changed)
    AutoModelForCausalLM.from_pretrained(folder)


def test_bench_measures_the_base_model_and_every_checkpoint(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    assert run(tmp_path, config).returncode == 0
    done = run(tmp_path, config, "mode=bench")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "checkpoints/tests/job/monitor/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    measured = [r["step"] for r in rows if any(k.startswith("bench/") for k in r["metrics"])]
    assert measured == [0, 2, 4]


def test_explore_and_train_as_two_commands_on_one_folder(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config["buffer"]["train_batch_size"] = 16
    config["buffer"]["trainer_input"] = {
        "experience_buffer": {"storage_type": "sql", "name": "shared"}
    }
    config["synchronizer"] = {"sync_style": "explorer_driven", "sync_interval": 9}
    processes = []
    for mode in ("explore", "train"):
        (tmp_path / mode).mkdir()
        processes.append(started(tmp_path / mode, config, f"mode={mode}"))
    for process in processes:
        process.ends_well()
    job = tmp_path / "checkpoints/tests/job"
    assert [row["sync/version"] for row in metrics(job, "explorer")] == [0, 0, 0, 0]
    evaluated = map(json.loads, (job / "buffer/evaluation.jsonl").open())
    versions = {line["step"]: line["model_version"] for line in evaluated}
    assert versions == {0: 0, 4: 1}, "at the end, by the last weights"
    with sqlite3.connect(job / "buffer/shared.db") as database:
        assert database.execute("select consumed, count(*) from shared group by 1").fetchall() == [
            (1, 64)
        ]


def test_a_second_run_does_not_train_in_the_same_folder(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "checkpoints/tests/job")
    folder.make()
    with folder.one_trainer():
        done = run(tmp_path, small_config(tmp_path))
    assert done.returncode == 1
    assert f"error: {folder.root} has a run that trains in it" in done.stderr
    assert "Traceback" not in done.stderr
    with folder.one_trainer():  # free again
        pass


def test_no_row_of_a_data_set_is_trained_more_often_than_its_epochs(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    longer = " and so on" * 60
    data = [{"prompt": f"What is {n}?" + longer * (n % 2), "response": "seven"} for n in range(16)]
    path = write_jsonl(tmp_path / "data/sft.jsonl", data)
    form = {"prompt_type": "plaintext", "prompt_key": "prompt", "response_key": "response"}
    store = {"name": "pairs", "storage_type": "file", "path": str(path), "format": form}
    config["buffer"] = {"trainer_input": {"experience_buffer": store}}
    config |= {"mode": "train", "algorithm": {"algorithm_type": "sft"}}
    for words in (
        ["buffer.train_batch_size=4", "trainer.total_steps=1"],
        ["buffer.train_batch_size=3"],  # which makes 5 steps of 16 rows: half of them are too long
    ):
        done = run(tmp_path, config, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "checkpoints/tests/job/buffer/data_rows.jsonl").read_text().splitlines()
    rows = [(row["step"], row["eid"]) for row in map(json.loads, lines)]
    assert [step for step, _ in rows] == [1] * 4 + [2] * 3 + [3]
    assert {eid for _, eid in rows} == {f"0/{n}/0/0" for n in range(0, 16, 2)}

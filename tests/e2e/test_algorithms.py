"""Algorithms that need more than rewards, by the real command line: critic, pairs, experts, text,
greedy baselines, teachers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.job import rows, run, small_config, started, weights, write_jsonl
from tests.tiny import make_model, make_tokenizer


def _config(folder: Path, algorithm: str, **given: Any) -> dict[str, Any]:
    config = small_config(folder)
    config["algorithm"] = {
        "algorithm_type": algorithm,
        "repeat_times": 4,
        "optimizer": {"lr": 1e-3},
        **given,
    }
    config["buffer"]["explorer_input"]["eval_tasksets"] = []
    return config


def _trained(folder: Path, config: dict[str, Any], *overrides: str) -> list[dict[str, float]]:
    """The metrics of the run's train steps."""
    done = run(folder, config, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "checkpoints/tests/job/monitor/metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [row["metrics"] for row in found if row["part"] == "trainer"]


def _from_data(config: dict[str, Any], path: Path, size: int) -> dict[str, Any]:
    config["mode"] = "train"
    config["buffer"] = {
        "train_batch_size": size,
        "total_epochs": 2,
        "trainer_input": {"experience_buffer": {"name": "data", "path": str(path)}},
    }
    config["trainer"]["save_interval"] = 0
    return config


def test_ppo_saves_its_critic_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        "ppo",
        kl_loss_fn="none",
        kl_penalty_fn="k1",
        kl_penalty_fn_args={"kl_coef": 0.1, "adaptive": True, "target_kl": 0.01, "horizon": 100},
        critic={"optimizer": {"lr": 1e-3}},
    )
    trained = _trained(tmp_path, config)
    assert [row["critic/lr"] for row in trained] == [1e-3] * 4
    assert trained[0]["critic/value_mean"] == 0 != trained[1]["critic/value_mean"]
    assert trained[3]["critic/kl_coef"] != trained[0]["critic/kl_coef"] == 0.1
    job = tmp_path / "checkpoints/tests/job"
    critic = job / "global_step_4/critic/model.safetensors"
    assert "value_head.weight" in load_file(critic)
    expected = weights(job, 4), critic.read_bytes()
    shutil.rmtree(job / "global_step_4")
    again = _trained(tmp_path, config)
    assert (weights(job, 4), critic.read_bytes()) == expected
    assert again[-1]["critic/kl_coef"] == trained[3]["critic/kl_coef"]


def test_dpo_learns_which_reply_is_better_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    pairs = [
        {"prompt": row["question"], "chosen": "yes, " + row["answer"], "rejected": "no"}
        for row in rows(8)
    ]
    data = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    config = _from_data(_config(tmp_path, "dpo"), data, 4)
    config["trainer"]["save_interval"] = 3  # within the second epoch, which has an order of its own
    trained = _trained(tmp_path, config)
    assert len(trained) == 4
    assert abs(trained[0]["actor/loss"] - 0.6931) < 1e-3  # log 2: policy and reference are equal
    assert trained[-1]["actor/loss"] < 0.6 and trained[-1]["actor/dpo_accuracy"] == 1
    job = tmp_path / "checkpoints/tests/job"
    expected = weights(job, 4)
    shutil.rmtree(job / "global_step_4")
    _trained(tmp_path, config)
    assert weights(job, 4) == expected


def test_kto_learns_which_replies_are_desirable_and_resumes_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    labelled = [
        {"prompt": row["question"], "completion": reply, "label": label}
        for row in rows(8)
        for reply, label in (("yes, " + row["answer"], True), ("no", False))
    ]
    data = write_jsonl(tmp_path / "labelled.jsonl", labelled)
    config = _from_data(_config(tmp_path, "kto"), data, 8)
    config["buffer"]["total_epochs"] = 4
    config["algorithm"]["policy_loss_fn_args"] = {"beta": 0.5}
    config["trainer"]["save_interval"] = 4
    trained = _trained(tmp_path, config)
    assert abs(trained[0]["actor/kto_loss"] - 0.5) < 1e-3  # policy and reference are equal
    assert trained[0]["actor/kto_reference_point"] == 0 < trained[-1]["actor/kto_reference_point"]
    assert trained[-1]["actor/kto_loss"] < 0.45
    assert trained[-1]["actor/kto_reward_desirable"] > trained[-1]["actor/kto_reward_undesirable"]
    job = tmp_path / "checkpoints/tests/job"
    expected = weights(job, 8)
    shutil.rmtree(job / "global_step_8")
    _trained(tmp_path, config)
    assert weights(job, 8) == expected


def test_continued_pretraining_reads_plain_text(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "text.jsonl", [{"text": row["answer"]} for row in rows(96)])
    trained = _trained(tmp_path, _from_data(_config(tmp_path, "cpt"), data, 4))
    assert trained[-1]["actor/loss"] < trained[0]["actor/loss"]
    # every character but the first, and the end
    assert trained[0]["perf/trained_tokens"] > 4 * len("1 + 2 = 3.\n#### 3")


@pytest.mark.extension("more_losses")
def test_mix_learns_from_rollouts_and_from_an_expert(tmp_path: Path) -> None:
    config = _config(tmp_path, "mix_chord", kl_loss_fn="none")
    data = write_jsonl(tmp_path / "expert.jsonl", rows(5))
    config["buffer"]["train_batch_size"] = 20
    config["algorithm"]["sample_strategy_args"] = {"expert_data_ratio": 0.2}
    config["buffer"]["trainer_input"] = {"auxiliary_buffers": {"sft_dataset": {"path": str(data)}}}
    trained = _trained(tmp_path, config)
    assert [row["sample/expert_count"] for row in trained] == [4] * 4
    assert [row["perf/experiences"] for row in trained] == [20] * 4
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in trained)
    job = tmp_path / "checkpoints/tests/job"
    expected = weights(job, 4)
    shutil.rmtree(job / "global_step_4")
    _trained(tmp_path, config)
    assert weights(job, 4) == expected


def test_remax_compares_with_a_greedy_rollout(tmp_path: Path) -> None:
    config = _config(tmp_path, "remax")
    trained = _trained(tmp_path, config)
    assert len(trained) == 4
    # run 0 of each of the four tasks has nothing to learn
    assert all(row["perf/idle_experiences"] >= 4 for row in trained)


@pytest.mark.extension("more_losses")
def test_a_teacher_scores_what_the_student_says(tmp_path: Path) -> None:
    config = _config(tmp_path, "jsd")
    teacher = make_model(tmp_path / "teacher", hidden=64, seed=3, max_len=256)
    config["explorer"]["auxiliary_models"] = [{"model_path": str(teacher)}]
    taskset = config["buffer"]["explorer_input"]
    taskset["default_workflow_type"] = "on_policy_distill_workflow"
    del taskset["default_reward_fn_type"]
    trained = _trained(tmp_path, config)
    assert all(row["critic/advantage_abs_mean"] > 0 for row in trained)
    other = make_tokenizer()
    other.add_tokens(["something else"])
    other.save_pretrained(teacher)
    done = run(tmp_path, config, "name=other")
    assert done.returncode != 0
    assert "has another vocabulary than model.model_path" in done.stdout + done.stderr


def test_a_teacher_beside_rewards_travels_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    """GRPO of several turns with a teacher's divergence in its loss, on SQL, with an adapter."""
    config = _config(tmp_path, "grpo", teacher_kl_fn="k2", teacher_kl_fn_args={"kl_coef": 0.5})
    config["model"]["lora_configs"] = [{"lora_rank": 4}]
    teacher = make_model(tmp_path / "teacher", hidden=64, seed=3, max_len=256)
    config["explorer"]["auxiliary_models"] = [{"model_path": str(teacher)}]
    taskset = config["buffer"]["explorer_input"]
    taskset["default_workflow_type"] = "multi_turn_scheduler"
    taskset["taskset"]["workflow_args"] = {"scheduler": "math_tip_trick_multi_turn", "max_turns": 2}
    config["buffer"]["trainer_input"] = {"experience_buffer": {"storage_type": "sql"}}
    trained = _trained(tmp_path, config)
    assert len(trained) == 4
    assert all(row["actor/teacher_kl_loss"] > 0 for row in trained)
    whole = weights(tmp_path / "checkpoints/tests/job", 4)
    done = run(tmp_path, config, "name=other", "algorithm.teacher_kl_fn_args.kl_coef=0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(tmp_path / "checkpoints/tests/other", 4) != whole
    job = tmp_path / "checkpoints/tests/killed"
    started(tmp_path, config, "name=killed").kill_when(job / "global_step_2")
    done = run(tmp_path, config, "name=killed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(job, 4) == whole


def test_dapo_samples_anew_so_often_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    config = _config(tmp_path, "dapo", advantage_fn_args={"max_resample_times": 1})
    config["buffer"]["explorer_input"]["default_reward_fn_type"] = "tests.e2e.job:rare_reward"
    config["buffer"]["total_steps"] = 8
    config["trainer"]["save_interval"] = 1
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(algorithm.advantage_fn_args.max_resample_times)" in done.stdout + done.stderr
    lines = (tmp_path / "checkpoints/tests/job/monitor/metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    explored = [row["metrics"] for row in found if row["part"] == "explorer"]
    times = [row["experience_pipeline/resample_times"] for row in explored]
    refilled = [row["experience_pipeline/refilled_count"] for row in explored]
    assert len(times) == 8 and set(times) == {0.0, 1.0}
    assert all(bool(count) <= (time == 1) for time, count in zip(times, refilled, strict=True))
    trained = [row["metrics"] for row in found if row["part"] == "trainer"]
    assert len(trained) == times.count(1.0) and any(refilled)
    assert all(row["perf/experiences"] == 16 for row in trained)
    whole = weights(tmp_path / "checkpoints/tests/job", len(trained))
    job = tmp_path / "checkpoints/tests/killed"
    started(tmp_path, config, "name=killed").kill_when(job / "global_step_2")
    done = run(tmp_path, config, "name=killed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(job, len(trained)) == whole


def test_corrected_rollouts_of_an_older_engine(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        "grpo",
        kl_loss_fn="none",
        rollout_correction={"rollout_is": "token", "rollout_rs": "sequence"},
    )
    config["synchronizer"] = {"sync_offset": 1}
    trained = _trained(tmp_path, config)
    assert all(row["actor/ppo_kl"] == 0 for row in trained)  # the trainer's own are the old ones
    weight = torch.tensor([row["rollout_correction/weight"] for row in trained])
    assert bool((weight[-1] - 1).abs() > 1e-6)

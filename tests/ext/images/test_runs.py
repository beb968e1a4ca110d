"""Whole runs with pictures: stores, kills, stages, and what `check` refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature

from tests.e2e.job import run, small_config, started, write_jsonl
from tests.ext.images.seeing import make_seeing, picture, png
from trireme.files import read_jsonl

COLOURS = ("red", "green", "blue", "orange")


def rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """Questions with files of pictures: every second row shows two."""
    folder.mkdir(parents=True)
    out = []
    for number in range(count):
        names = []
        for place in range(1 + number % 2):
            file = folder / f"{number}_{place}.png"
            file.write_bytes(png(picture(COLOURS[(number + place) % 4], dot=(20 + number, 20))))
            names.append(str(file))
        out.append({"question": "What colour?", "answer": COLOURS[number % 4], "images": names})
    return out


def config_of(
    folder: Path, family: str = "qwen3_vl", model: Any = None, **store: Any
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    config = small_config(folder)
    config["model"]["model_path"] = str(make_seeing(folder / "seeing", family, **(model or {})))
    config["trainer"]["save_interval"] = 1
    data = rows(folder / "pictures", 16)
    config["buffer"]["explorer_input"]["taskset"]["path"] = str(
        write_jsonl(folder / "seen.jsonl", data)
    )
    held_out = config["buffer"]["explorer_input"]["eval_tasksets"][0]
    held_out["path"] = str(write_jsonl(folder / "held_out.jsonl", data[:3]))
    if store:
        config["buffer"]["trainer_input"] = {"experience_buffer": {"name": "seen", **store}}
    return config


def exported(folder: Path) -> bytes:
    place = folder / "checkpoints/tests/job/global_step_4/actor/huggingface/model.safetensors"
    return place.read_bytes()


def gaps(folder: Path) -> list[float]:
    """|engine - trainer| of each step, nats."""
    [file] = folder.rglob("monitor/metrics.jsonl")
    name = "rollout/logprob_diff_max"
    return [row["metrics"][name] for row in read_jsonl(file) if name in row["metrics"]]


@pytest.mark.parametrize(
    ("family", "trained"), [("qwen3_5", False), ("gemma3", True)], ids=["states", "tower"]
)
def test_a_killed_run_resumes_to_the_same_bytes(family: str, trained: bool, tmp_path: Path) -> None:
    """Of a family whose layers have a state, and of one whose tower is trained."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    keys = {"freeze_vision_tower": not trained, "freeze_projector": not trained}

    def config_in(folder: Path) -> dict[str, Any]:
        config = config_of(folder, family)
        config["model"] |= keys
        return config

    done = run(whole, config_in(whole))
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(gaps(whole)) < 1e-4
    config = config_in(killed)
    started(killed, config).kill_when(killed / "checkpoints/tests/job/global_step_2")
    done = run(killed, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert exported(whole) == exported(killed)
    folder = whole / "checkpoints/tests/job/global_step_4/actor/huggingface"
    assert (folder / "preprocessor_config.json").is_file()  # another program sees with it too


@pytest.mark.extension("sql")
def test_a_database_in_between_changes_nothing(tmp_path: Path) -> None:
    plain, through = tmp_path / "plain", tmp_path / "through"
    sql = {"storage_type": "sql", "path": f"sqlite:///{tmp_path / 'seen.db'}"}
    for folder, store in ((plain, {}), (through, sql)):
        done = run(folder, config_of(folder, **store))
        assert done.returncode == 0, done.stdout + done.stderr
    assert exported(plain) == exported(through)


@pytest.mark.extension("remote")
def test_engines_of_other_processes_get_each_picture_once(tmp_path: Path) -> None:
    """And sample what the trainer computes, also after a push."""
    folder = tmp_path / "job"
    config = config_of(folder)
    config["explorer"]["rollout_model"] = {"engine_type": "torch", "engine_num": 2}
    config["buffer"]["total_steps"] = 2
    done = run(folder, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(gaps(folder)) == 2 and max(gaps(folder)) < 1e-4


@pytest.mark.extension("multi_turn")
def test_a_scheduler_leads_conversations_with_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    config = config_of(folder)
    asked = config["buffer"]["explorer_input"]
    for taskset in (asked["taskset"], *asked["eval_tasksets"]):
        taskset["default_workflow_type"] = "multi_turn_scheduler"
        taskset["workflow_args"] = {"scheduler": "math_tip_trick_multi_turn", "max_turns": 2}
    config["buffer"]["total_steps"] = 1
    done = run(folder, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(gaps(folder)) < 1e-4


def test_sft_and_pairs_see_the_pictures_of_their_rows(tmp_path: Path) -> None:
    """Columns of `datasets` with decoded pictures; two rows of one question and two pictures would
    be one sample without them.
    """
    folder = tmp_path / "job"
    config = config_of(folder)
    shown = [
        {"question": "What?", "answer": name, "worse": COLOURS[at - 1], "image": picture(name)}
        for at, name in enumerate(COLOURS)
    ]
    features = Features(
        {name: Value("string") for name in ("question", "answer", "worse")}
        | {"image": ImageFeature()}
    )
    Dataset.from_list(shown, features=features).save_to_disk(str(folder / "solved"))
    columns = {"prompt_key": "question", "response_key": "answer", "image_key": "image"}
    pairs = {
        "prompt_key": "question",
        "chosen_key": "answer",
        "rejected_key": "worse",
        "image_key": "image",
    }
    config["stages"] = [
        stage("sft", {"algorithm_type": "sft", "optimizer": {"lr": 1e-2}}, folder, columns, 12),
        stage("dpo", {"algorithm_type": "dpo", "optimizer": {"lr": 1e-3}}, folder, pairs, 2),
    ]
    done = run(folder, config)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = (folder / "checkpoints/tests/job/sft").rglob("monitor/metrics.jsonl")
    losses = [
        r["metrics"]["actor/sft_loss"] for r in read_jsonl(file) if "actor/sft_loss" in r["metrics"]
    ]
    assert losses[-1] < 0.8 * losses[0]


def stage(name: str, algorithm: Any, folder: Path, columns: Any, steps: int) -> dict[str, Any]:
    store = {"name": name, "path": str(folder / "solved"), "format": columns}
    return {
        "stage_name": name,
        "mode": "train",
        "algorithm": algorithm,
        "buffer": {
            "train_batch_size": 4,
            "total_steps": steps,
            "trainer_input": {"experience_buffer": store},
        },
    }


def test_trinitys_yaml_of_pictures_passes_check(tmp_path: Path) -> None:
    """The keys of its examples `grpo_vlm` and `mix_vlm`, on tiny data: the workflow by its name,
    the engine told that there are pictures.
    """
    folder = tmp_path / "job"
    config = config_of(folder)
    config["explorer"]["rollout_model"] = {"engine_num": 1, "enable_multimodal": True}
    given = config["buffer"]["explorer_input"]
    given["default_workflow_type"] = "simple_mm_workflow"
    given["default_reward_fn_type"] = "math_boxed_reward"
    given["taskset"]["format"] |= {"image_key": "images"}
    config["buffer"]["total_steps"] = 1
    config["explorer"]["eval_interval"] = 100
    given["eval_tasksets"] = []
    expert = folder / "expert.jsonl"
    seen = read_jsonl(folder / "seen.jsonl")
    chats = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": f"\\\\boxed{{{row['answer']}}}"},
            ],
            "images": row["images"],
        }
        for row in seen
    ]
    write_jsonl(expert, chats)
    config["algorithm"] = {
        "algorithm_type": "mix",
        "repeat_times": 2,
        "sample_strategy_args": {"expert_data_ratio": 0.25},
        "optimizer": {"lr": 1e-4},
    }
    config["buffer"]["train_batch_size"] = 8
    config["buffer"]["batch_size"] = 3
    config["buffer"]["trainer_input"] = {
        "auxiliary_buffers": {
            "sft_dataset": {
                "storage_type": "file",
                "path": str(expert),
                "format": {"messages_key": "messages", "image_key": "images"},
            }
        }
    }
    done = run(folder, config)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_model_that_sees_nothing_is_refused_before_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    config = config_of(folder)
    config["model"]["model_path"] = str(folder / "model")  # text alone
    done = run(folder, config)
    assert done.returncode == 2 or done.returncode == 1
    assert "a message shows a picture, and this model takes text alone" in done.stdout + done.stderr


def test_a_damaged_picture_is_named_with_its_row(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    config = config_of(folder)
    (folder / "pictures" / "0_0.png").write_bytes(b"no picture")
    done = run(folder, config)
    assert done.returncode
    text = done.stdout + done.stderr
    assert "a picture of 10 bytes cannot be decoded" in text
    assert "seen.jsonl' (split 'train'), row 0 (" in text and "seen.jsonl, line 1)" in text

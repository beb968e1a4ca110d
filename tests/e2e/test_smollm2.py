"""Whole runs of a real model: killed and resumed, evaluated, the seeds' YAML, and a plug-in for
ms-swift.

`make smollm2` makes the model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from tests.e2e.job import ROOT, Forked, rows, trireme, write_jsonl
from tests.e2e.test_swift_plugin import FLAGS, PLUGIN
from trireme.ext.converters.gguf import ORIGIN

MODEL = ROOT / "examples" / "smollm2" / "model"
WORDS = ROOT / "examples" / "smollm2" / "words.yaml"
QUESTIONS = [
    f"Describe the word '{word}' in exactly six words." for word in ("sea", "bread", "owl")
]
pytestmark = [
    pytest.mark.skipif(not (MODEL / ORIGIN).is_file(), reason="no smollm2: make smollm2"),
    pytest.mark.extension("converters", "swift", "multi_turn", "evaluation"),
    pytest.mark.slow,
]


def describing(folder: Path, name: str) -> list[str]:
    """The words of a short run of words.yaml."""
    asked = write_jsonl(
        folder / "words.jsonl", [{"question": one, "count": 6} for one in QUESTIONS]
    )
    overrides: dict[str, Any] = {
        "name": name,
        "model.model_path": MODEL,
        "checkpoint_root_dir": folder,
        "continue_from_checkpoint": "true",
        "model.max_response_tokens": 16,
        "algorithm.repeat_times": 4,
        "buffer.batch_size": 1,
        "buffer.total_steps": 3,
        "buffer.explorer_input.taskset.path": asked,
        "buffer.explorer_input.eval_tasksets": "[]",
        "trainer.save_interval": 1,
    }
    return ["run", str(WORDS), *(f"{key}={value}" for key, value in overrides.items())]


@pytest.mark.parametrize("native", ["1", "0"], ids=["compiled", "plain"])
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path, native: str) -> None:
    """The log-probabilities too: the engine of a resume decodes as that of the run did, with one
    library of matrix products as with the other.
    """
    chosen = {"TRIREME_NATIVE": native}
    done = trireme(tmp_path, *describing(tmp_path, "whole"), **chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    killed = Forked(describing(tmp_path, "killed"), tmp_path, chosen)
    killed.kill_when(tmp_path / "smollm2" / "killed" / "global_step_2")
    done = trireme(tmp_path, *describing(tmp_path, "killed"), **chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from" in done.stdout
    for file in (
        "buffer/trained/step_3.safetensors",
        "global_step_3/actor/huggingface/model.safetensors",
    ):
        whole, resumed = (
            (tmp_path / "smollm2" / name / file).read_bytes() for name in ("whole", "killed")
        )
        assert whole == resumed, file
    rmtree(tmp_path / "smollm2")  # 10 GB


def test_eval_scores_the_replies_of_generate(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked = write_jsonl(
        tmp_path / "words.jsonl", [{"question": one, "count": 6} for one in QUESTIONS]
    )
    (tmp_path / "mine.py").write_text(
        "def letters(task, answer):\n    return float(sum(map(str.isalpha, answer)))\n"
    )
    words = ["eval", "--model", str(MODEL), "--tasks", str(asked), "--reward", "mine:letters"]
    words += ["--workflow", "simple_workflow", "--response-key", ""]
    words += ["--temperature", "0", "--max-tokens", "20", "--out", "scores.json"]
    done = trireme(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL)
    expected = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        reply = model.generate(torch.as_tensor(ids), max_new_tokens=20, do_sample=False)
        text = tokenizer.decode(reply[0, ids.shape[1] :], skip_special_tokens=True)
        expected.append(float(sum(map(str.isalpha, text))))
    assert numbers(json.loads((tmp_path / "scores.json").read_text())) >= {sum(expected) / 3}


def numbers(tree: Any) -> set[float]:
    """All numbers of a JSON document."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return set().union(*map(numbers, tree))
    return {float(tree)} if isinstance(tree, int | float) else set()


def test_the_seeds_yaml_trains_it_by_the_seeds_variables(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "gsm8k" / "main" / "train.jsonl", rows(8))
    write_jsonl(tmp_path / "gsm8k" / "main" / "test.jsonl", rows(2, 500))
    overrides = {
        "model.max_response_tokens": 16,
        "model.max_model_len": 512,
        "algorithm.repeat_times": 2,
        "buffer.batch_size": 2,
        "buffer.train_batch_size": 4,
        "buffer.total_steps": 1,
        "explorer.eval_interval": 1,
    }
    done = trireme(
        tmp_path,
        *("run", "--config", str(ROOT / "examples" / "grpo_gsm8k" / "gsm8k.yaml")),
        *(f"{key}={value}" for key, value in overrides.items()),
        TRIREME_MODEL_PATH=str(MODEL),
        TRIREME_TASKSET_PATH=str(tmp_path / "gsm8k"),
        TRIREME_CHECKPOINT_ROOT_DIR=str(tmp_path / "checkpoints"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = tmp_path.rglob("experience_buffer.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == 4 and all("<|im_start|>" in row["prompt"] for row in found)


def test_a_plug_in_for_ms_swift_trains_it_unedited(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    asked = write_jsonl(tmp_path / "data.jsonl", rows(2))
    config = tmp_path / "config.yaml"
    config.write_text(
        json.dumps(
            {
                "name": "plugin",
                "checkpoint_root_dir": str(tmp_path),
                "algorithm": {"algorithm_type": "grpo", "repeat_times": 2, "kl_loss_fn": "none"},
                "model": {
                    "model_path": str(MODEL),
                    "max_response_tokens": 12,
                    "max_model_len": 160,
                },
                "buffer": {
                    "batch_size": 2,
                    "total_steps": 1,
                    "explorer_input": {
                        "default_workflow_type": "simple_workflow",
                        "taskset": {
                            "path": str(asked),
                            "format": {"prompt_key": "question", "response_key": "answer"},
                        },
                    },
                },
                "explorer": {"env_vars": {"OF_THE_RUNNERS": "here"}},
            }
        )
    )
    done = trireme(tmp_path, "run", "--config", str(config), *FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = tmp_path.rglob("experience_buffer.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == 4
    for row in found:
        assert "<|im_start|>user\nAgain.<|im_end|>" in row["prompt"] + row["response"]
        assert row["trained_tokens"] <= 13  # of two turns the last alone

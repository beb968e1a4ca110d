"""Seed 003: its GSM8K YAML as it stands runs to the end on a CPU, and leaves the seed's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.job import ROOT, rows, trireme, write_jsonl
from tests.tiny import make_model
from trireme.registry import COMMANDS

SHIPPED = ROOT / "examples/grpo_gsm8k/gsm8k.yaml"
STAGES = """
stages:
  - stage_name: sft_warmup
    mode: train
    algorithm:
      algorithm_type: sft
    buffer:
      train_batch_size: 128
      total_steps: 10
      trainer_input:
        experience_buffer:
          name: sft_warmup_dataset
          path: {path}
  - stage_name: rft
"""


def early_ending_model(folder: Path) -> Path:
    """A model whose replies end after a few tokens: it has seen nothing but ends."""
    make_model(folder, "qwen2", max_len=2048, hidden=32)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    for _ in range(20):
        ids = torch.randint(3, 98, (16, 24))
        targets = torch.where(torch.rand(16, 24) < 0.2, 2, ids)
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def data_set(folder: Path, *, header: bool) -> Path:
    """The Hugging Face layout of gsm8k: config `main`, splits train and test."""
    write_jsonl(folder / "main/train.jsonl", rows(128))
    write_jsonl(folder / "main/test.jsonl", rows(8, 500))
    if header:
        files = [{"split": s, "path": f"main/{s}.jsonl"} for s in ("train", "test")]
        text = yaml.safe_dump({"configs": [{"config_name": "main", "data_files": files}]})
        (folder / "README.md").write_text(f"---\n{text}---\n# Sums\n")
    return folder


@pytest.mark.parametrize("header", [True, False])
def test_the_yaml_runs_and_leaves_the_seeds_folder(tmp_path: Path, header: bool) -> None:
    variables = {
        "TRINITY_MODEL_PATH": str(early_ending_model(tmp_path / "model")),
        "TRINITY_TASKSET_PATH": str(data_set(tmp_path / "gsm8k", header=header)),
    }
    done = trireme(tmp_path, "run", "--config", str(SHIPPED), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("cluster asks for 2 GPUs") == 1
    config = yaml.safe_load(SHIPPED.read_text())
    job = tmp_path / "checkpoints" / config["project"] / config["name"]
    for name in (
        "buffer/experience_buffer.jsonl", "buffer/explorer_output.db", "buffer/gsm8k.db",
        "log/checkpoint_monitor.log", "log/explorer.log", "log/explorer_experience_pipeline.log",
        "log/explorer_runner_0.log", "log/explorer_runner_15.log", "log/synchronizer.log",
        "log/queue_experience_buffer.log", "monitor", "explorer_meta.json", "trainer_meta.json",
        "latest_checkpointed_iteration.txt", "latest_state_dict_iteration.txt",
        "global_step_1/actor/huggingface/model.safetensors",
        "global_step_1/actor/huggingface/tokenizer.json",
    ):  # fmt: skip
        assert (job / name).exists(), name
    if "convert" in COMMANDS:
        converted = trireme(
            tmp_path, "convert", "--checkpoint-dir", str(job / "global_step_1/actor")
        )
        assert converted.returncode == 0 and "1 complete already" in converted.stdout
    exported = job / "global_step_1/actor/huggingface"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        original = Path(variables["TRINITY_MODEL_PATH"]) / name
        assert (exported / name).read_bytes() == original.read_bytes()
    AutoModelForCausalLM.from_pretrained(exported)


def test_the_stages_variant_runs_sft_then_rft_from_its_model(tmp_path: Path) -> None:
    warm = write_jsonl(tmp_path / "warm.jsonl", rows(128))
    path = tmp_path / "gsm8k.yaml"
    path.write_text(SHIPPED.read_text() + STAGES.format(path=warm))
    variables = {
        "TRINITY_MODEL_PATH": str(early_ending_model(tmp_path / "model")),
        "TRINITY_TASKSET_PATH": str(data_set(tmp_path / "gsm8k", header=True)),
    }
    done = trireme(tmp_path, "run", "--config", str(path), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    config = yaml.safe_load(SHIPPED.read_text())
    job = tmp_path / "checkpoints" / config["project"] / config["name"]
    file = "actor/huggingface/model.safetensors"
    first = load_file(os.path.join(variables["TRINITY_MODEL_PATH"], "model.safetensors"))
    warmed = load_file(job / "sft_warmup/global_step_10" / file)
    last = load_file(job / "rft/global_step_1" / file)
    distance = {
        "first": max(float((last[n] - t).abs().max()) for n, t in first.items()),
        "warmed": max(float((last[n] - t).abs().max()) for n, t in warmed.items()),
    }
    # one GRPO step at lr 1e-5 moves each weight by about 1e-5, ten SFT steps by ten times as much
    assert 0 < distance["warmed"] < 3e-5 < distance["first"]

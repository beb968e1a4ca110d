"""Whole runs of composites: killed and resumed by bytes, with towers that stay what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.composites import make_composite
from tests.e2e.job import run, small_config, started
from tests.e2e.test_engine_processes import TORCH, VLLM, scalars, survives_a_killed_engine
from tests.tested import COMPOSITES, RESUME, families
from tests.trainer.samples import backend_of
from tests.trainer.test_composites import SIGHT
from tests.vllm import needs_vllm


def loaded(folder: Path) -> dict[str, Tensor]:
    """The tensors of the class that the folder names, of which none may be missing."""
    named = AutoConfig.from_pretrained(folder).architectures
    found: Any = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    model, report = found
    assert named == [type(model).__name__]
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model.state_dict()


def config_of(folder: Path, family: str) -> dict[str, Any]:
    folder.mkdir()
    config = small_config(folder)
    config["model"]["model_path"] = str(make_composite(folder / "composite", family))
    config["trainer"]["save_interval"] = 1
    return config


@pytest.mark.parametrize("family", families(RESUME, COMPOSITES))
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path, family: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run(whole, config_of(whole, family))
    assert done.returncode == 0, done.stdout + done.stderr
    config = config_of(killed, family)
    started(killed, config).kill_when(killed / "checkpoints/tests/job/global_step_2")
    done = run(killed, config)
    assert done.returncode == 0, done.stdout + done.stderr
    exported = "checkpoints/tests/job/global_step_4/actor/huggingface"
    files = [folder / exported / "model.safetensors" for folder in (whole, killed)]
    assert files[0].read_bytes() == files[1].read_bytes()
    before, after = (loaded(folder) for folder in (whole / "composite", whole / exported))
    assert set(before) == set(after)
    moved = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert moved and not any(part in name for name in moved for part in SIGHT)


def test_an_adapter_is_on_the_text_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path / "job", "gemma3")
    config["model"]["lora_configs"] = [{"lora_rank": 4, "lora_alpha": 8}]
    config["buffer"]["total_steps"] = 1
    done = run(tmp_path / "job", config)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = (tmp_path / "job" / "checkpoints").rglob("adapter_model.safetensors")
    names = set(load_file(file))
    assert any("q_proj" in name for name in names)
    assert not any(part in name for name in names for part in SIGHT)


def processes(folder: Path, family: str, engine: dict[str, Any], method: str) -> dict[str, Any]:
    """A run whose engine is in another process."""
    wide = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = small_config(folder)
    config["model"]["model_path"] = str(make_composite(folder / "composite", family, **wide))
    config["explorer"]["rollout_model"] = engine
    config["synchronizer"] = {"sync_method": method}
    return config


def text_bytes(folder: Path) -> int:
    """The size of the language model's tensors."""
    weights = load_file(folder / "composite/model.safetensors")
    return sum(t.nbytes for n, t in weights.items() if not any(part in n for part in SIGHT))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "engine", "method"),
    [
        ("gemma3", TORCH, "nccl"),
        pytest.param("qwen3_vl", TORCH, "memory", marks=pytest.mark.large),
        pytest.param("idefics3", VLLM, "nccl", marks=needs_vllm),
    ],
)
def test_towers_reach_no_engine_of_another_process_also_after_a_resume(
    tmp_path: Path, family: str, engine: dict[str, Any], method: str
) -> None:
    config = processes(tmp_path, family, engine, method)
    config["trainer"]["save_interval"] = 1
    for steps in (1, 2):
        done = run(tmp_path, config, f"buffer.total_steps={steps}")
        assert done.returncode == 0, done.stderr
    assert max(scalars(tmp_path, "sync/version")) == 2
    assert max(scalars(tmp_path, "sync/probe_diff")) < 1e-4
    assert max(scalars(tmp_path, "rollout/logprob_diff_max")) < 1e-4
    assert set(scalars(tmp_path, "sync/pushed_bytes")) == {text_bytes(tmp_path)}
    exported = tmp_path / "checkpoints/tests/job/global_step_2/actor/huggingface"
    before, after = (loaded(folder) for folder in (tmp_path / "composite", exported))
    moved = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert moved and not any(part in name for name in moved for part in SIGHT)


@pytest.mark.slow
@pytest.mark.large
def test_an_engine_that_is_killed_has_the_towers_of_its_folder_again(tmp_path: Path) -> None:
    survives_a_killed_engine(tmp_path, processes(tmp_path, "gemma3", TORCH, "nccl"))
    assert set(scalars(tmp_path, "sync/pushed_bytes")) == {text_bytes(tmp_path)}


@pytest.mark.slow
def test_weights_in_files_have_the_towers(tmp_path: Path) -> None:
    """Explorers of other commands, and the checkpoint of that step, read them."""
    config = processes(tmp_path, "gemma3", TORCH, "checkpoint")
    config["trainer"]["save_interval"] = 100
    done = run(tmp_path, config, "buffer.total_steps=2")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "checkpoints/tests/job/global_step_1/actor/model.safetensors"
    assert set(load_file(file)) == set(backend_of(tmp_path / "composite").weights())
    assert max(scalars(tmp_path, "sync/probe_diff")) < 1e-4


@pytest.mark.slow
@needs_vllm
def test_vllm_and_the_trainer_of_a_composite_take_turns_on_one_device(tmp_path: Path) -> None:
    config = processes(tmp_path, "idefics3", VLLM, "nccl") | {"mode": "colocate"}
    done = run(tmp_path, config, "buffer.total_steps=2")
    assert done.returncode == 0, done.stderr
    assert set(scalars(tmp_path, "sync/pushed_bytes")) == {text_bytes(tmp_path)}
    assert max(scalars(tmp_path, "rollout/logprob_diff_max")) < 1e-4

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
from tests.tested import COMPOSITES, RESUME, families
from tests.trainer.test_composites import SIGHT


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

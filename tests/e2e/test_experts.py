"""A mixture of experts through the command line: it learns and is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.job import run, small_config
from tests.tiny import make_model


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

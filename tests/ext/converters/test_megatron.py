"""Checkpoints that Megatron wrote, tensor parallel 2 by pipeline parallel 2, as Hugging Face's.

`make test-megatron` runs these in an environment of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.limits import HANG_S

pytest.importorskip("megatron.core", reason="needs megatron-core: make test-megatron")

from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.checkpoint.models import random_model
from trireme.ext.converters.report import convert

Case = tuple[str, bool, str]

CASES: list[Case] = [
    ("qwen2", True, "stacked"),
    ("qwen2", False, "numbered"),
    ("qwen3", False, "stacked"),
    ("qwen3", True, "singleton"),
    ("llama", False, "stacked"),
    ("llama", True, "numbered"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """For each case a folder with `model` and `global_step_7/actor/dist_ckpt`."""
    folders = {case: tmp_path_factory.mktemp("-".join(map(str, case))) for case in CASES}
    words: list[str] = []
    for (arch, tie, layout), folder in folders.items():
        model = random_model(folder / "model", arch, tie=tie)
        words += [str(model), str(folder / "global_step_7" / "actor" / "dist_ckpt"), layout]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ext.converters.write_megatron", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_converted_checkpoint_computes_what_megatron_and_the_original_do(
    written: dict[Case, Path], case: Case
) -> None:
    model, actor = written[case] / "model", written[case] / "global_step_7" / "actor"
    assert convert([written[case]], model, "float32") == 0
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        original = AutoModelForCausalLM.from_pretrained(model)(ids).logits
        converted = AutoModelForCausalLM.from_pretrained(actor / "huggingface")(ids).logits
    megatron = torch.load(actor / "logits.pt", weights_only=True)
    assert torch.equal(converted, original)
    torch.testing.assert_close(converted, megatron, rtol=1e-5, atol=1e-5)


def test_an_iteration_of_megatrons_own_layout_becomes_bfloat16(
    written: dict[Case, Path], tmp_path: Path
) -> None:
    folder = written["qwen2", False, "numbered"]
    iteration = tmp_path / "run" / "iter_0000005"
    shutil.copytree(folder / "global_step_7" / "actor" / "dist_ckpt", iteration)
    assert convert([tmp_path / "run"], folder / "model") == 0
    with (
        safe_open(folder / "model" / "model.safetensors", "pt") as before,
        safe_open(iteration / "huggingface" / "model.safetensors", "pt") as after,
    ):
        assert sorted(before.keys()) == sorted(after.keys())
        for name in before.keys():  # noqa: SIM118 - it is no mapping
            assert torch.equal(before.get_tensor(name).bfloat16(), after.get_tensor(name)), name

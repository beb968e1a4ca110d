"""`trireme chat`: a conversation with a run's newest model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trireme.cli.main import app
from trireme.engines.make import EngineSpec
from trireme.ext.evaluation.chat import model_in


def test_lines_in_replies_out_until_an_empty_line(tiny_dir: Path) -> None:
    words = ["chat", str(tiny_dir), "--max-tokens", "4", "--system", "Be brief."]
    done = CliRunner().invoke(app, words, input="1 + 2?\nand 3?\n\nnot read\n")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"loading {tiny_dir}\nan empty line or Ctrl-D ends\n")
    assert CliRunner().invoke(app, words, input="1 + 2?\nand 3?\n").output == done.output
    assert len(done.output) > len(f"loading {tiny_dir}\nan empty line or Ctrl-D ends\n")


@pytest.mark.parametrize(("gpus", "made"), [(0, ("cpu", "float32")), (1, ("cuda", "bfloat16"))])
def test_on_a_gpu_a_model_takes_two_bytes_a_weight_as_in_its_run(
    gpus: int, made: tuple[str, str], tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[EngineSpec] = []

    def make(spec: EngineSpec, *_: Any) -> None:
        specs.append(spec)
        raise ValueError("no engine here")

    monkeypatch.setattr("trireme.engines.make.make_torch_engine", make)
    monkeypatch.setattr("trireme.ext.evaluation.chat.num_gpus", lambda: gpus)
    done = CliRunner().invoke(app, ["chat", str(tiny_dir)])
    assert [(spec.device, spec.dtype) for spec in specs] == [made], done.output


def test_the_newest_model_of_a_run_is_taken(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="contains no model: expected the folder of a model"):
        model_in(tmp_path)
    for number, name in enumerate(("sft/global_step_9", "grpo/global_step_2")):
        folder = tmp_path / name / "actor" / "huggingface"
        shutil.copytree(tiny_dir, folder)
        os.utime(folder / "config.json", (number, number))
    assert model_in(tmp_path) == tmp_path / "grpo/global_step_2/actor/huggingface"
    sft = tmp_path / "sft/global_step_9"
    assert model_in(tmp_path / "sft") == sft / "actor/huggingface"
    assert model_in(sft) == sft / "actor/huggingface"
    monkeypatch.chdir(sft)
    assert model_in(Path()) == sft / "actor/huggingface"


def test_a_checkpoint_that_is_not_exported_says_how_it_is(tiny_dir: Path, tmp_path: Path) -> None:
    step = tmp_path / "grpo" / "global_step_2"
    shutil.copytree(tiny_dir, step / "actor" / "huggingface")
    for file in (step / "actor" / "huggingface").glob("*.safetensors"):
        file.unlink()
    for folder in (tmp_path / "grpo", step, step / "actor" / "huggingface"):
        done = CliRunner().invoke(app, ["chat", str(folder)])
        assert done.exit_code == 2
        assert (
            f"holds no weights: export them first with `trireme convert -c {step}`" in done.stderr
        )

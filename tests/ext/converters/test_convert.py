"""convert: what this trainer writes, as folders that transformers loads."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoint.models import save_checkpoint, save_whole
from tests.tiny import make_model
from trireme.checkpoint.layout import JobFolder
from trireme.ext.converters.report import convert as convert_all


def save(job: Path, step: int, model: Path, *, hf: bool = False) -> Path:
    return save_checkpoint(
        JobFolder(job),
        step,
        save=partial(
            save_whole,
            weights=load_file(model / "model.safetensors"),
            optimizer={},
            extra={},
            hf=hf,
        ),
        run_state={},
        model_dir=model,
    )


def convert(path: Path, base: Path | None = None) -> int:
    return convert_all([path], base)


def exported(step: Path) -> Path:
    return step / "actor" / "huggingface" / "model.safetensors"


@pytest.mark.parametrize("arch", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tie", [True, False])
def test_the_exported_folder_loads_and_computes_the_same(
    tmp_path: Path, arch: str, tie: bool
) -> None:
    model = make_model(tmp_path / "model", arch, tie=tie)
    step = save(tmp_path / "job", 1, model)
    assert not exported(step).exists()
    assert convert(tmp_path / "job", None) == 0
    hf = step / "actor" / "huggingface"
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(model)(ids).logits
        after = AutoModelForCausalLM.from_pretrained(hf)(ids).logits
    assert torch.equal(before, after)
    text = AutoTokenizer.from_pretrained(hf)
    assert text.chat_template == AutoTokenizer.from_pretrained(model).chat_template


def test_all_steps_under_a_folder_are_converted_once(
    tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        save(tmp_path / "project" / "name", 2, tiny_dir),
        save(tmp_path / "project" / "name", 10, tiny_dir, hf=True),
        save(tmp_path / "project" / "name" / "sft", 1, tiny_dir),
    ]
    assert convert(tmp_path, None) == 0
    assert "2 exported, 1 complete already, 0 failed" in capsys.readouterr().out
    assert all(exported(step).exists() for step in steps)
    times = [exported(step).stat().st_mtime_ns for step in steps]
    assert convert(tmp_path, None) == 0
    assert "0 exported, 3 complete already, 0 failed" in capsys.readouterr().out
    assert [exported(step).stat().st_mtime_ns for step in steps] == times


def test_a_complete_export_in_another_dtype_is_named_and_a_copy_gives_the_one_asked_for(
    tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = save(tmp_path / "job", 1, tiny_dir)
    assert convert_all([step], dtype="bfloat16") == 0
    capsys.readouterr()
    assert convert_all([step], dtype="bfloat16") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert convert_all([step], dtype="float32") == 0
    assert "left as it is, in bfloat16: for float32 copy the checkpoint" in capsys.readouterr().out
    whole = save(tmp_path / "whole", 1, tiny_dir, hf=True)
    assert convert_all([whole], dtype="bfloat16") == 0
    assert (
        "in float32: there are no other weights to convert to bfloat16" in capsys.readouterr().out
    )
    copy = Path(shutil.copytree(step, tmp_path / "copy" / step.name))
    for file in (copy / "actor" / "huggingface").glob("*.safetensors"):
        file.unlink()
    assert convert_all([copy], dtype="float32") == 0
    trained = load_file(step / "actor" / "model.safetensors")
    written = load_file(exported(copy))
    for name, tensor in trained.items():
        assert torch.equal(written[name], tensor), name


@pytest.mark.parametrize("inner", ["", "actor", "actor/huggingface"])
def test_one_step_by_its_folder_or_one_inside_it(
    tmp_path: Path, tiny_dir: Path, inner: str
) -> None:
    step, other = save(tmp_path, 120, tiny_dir), save(tmp_path, 121, tiny_dir)
    assert convert(step / inner, None) == 0
    assert exported(step).exists() and not exported(other).exists()


def test_an_export_that_is_cut_is_made_again(tmp_path: Path, tiny_dir: Path) -> None:
    step = save(tmp_path, 1, tiny_dir)
    convert(tmp_path, None)
    whole = exported(step).read_bytes()
    exported(step).write_bytes(whole[:-5])
    assert convert(tmp_path, None) == 0
    assert exported(step).read_bytes() == whole


def test_a_damaged_file_with_nothing_to_make_it_from_fails(
    tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = save(tmp_path, 1, tiny_dir, hf=True)
    whole = exported(step).read_bytes()
    for damaged, said in ((whole[:-5], "bytes: expected"), (whole[:-1] + b"!", "the checksum")):
        exported(step).write_bytes(damaged)
        assert convert(tmp_path, None) == 1
        assert said in capsys.readouterr().out


def test_a_missing_layer_is_seen_by_the_configuration(
    tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = save(tmp_path, 1, tiny_dir, hf=True)
    path = step / "actor" / "huggingface" / "config.json"
    deeper = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | deeper))
    assert convert(tmp_path, None) == 1
    assert "tensor model.layers.2.self_attn.q_proj.weight is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "config.json holds a list: expected an object"),
        ("[" * 100_000, "config.json is not JSON that can be read: it is nested too deeply"),
        ("{", "config.json is not JSON"),
        ('{"model_type": [], "num_hidden_layers": "two"}', "has 'two' as num_hidden_layers"),
    ],
)
def test_a_damaged_configuration_is_one_sentence(
    text: str, said: str, tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = save(tmp_path, 1, tiny_dir, hf=True)
    (step / "actor" / "huggingface" / "config.json").write_text(text)
    assert convert(tmp_path, None) == 1
    assert said in capsys.readouterr().out


def test_a_checkpoint_without_configuration_asks_for_the_base_model(
    tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, fine = save(tmp_path, 1, tiny_dir), save(tmp_path, 2, tiny_dir)
    (step / "actor" / "huggingface" / "config.json").unlink()
    assert convert(tmp_path, None) == 1
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if "--base-model-dir" in line]
    assert str(step) in line and exported(fine).exists()
    assert convert(tmp_path, tmp_path) == 1
    assert "has no config.json" in capsys.readouterr().out
    assert convert(tmp_path, tiny_dir) == 0
    AutoModelForCausalLM.from_pretrained(step / "actor" / "huggingface")


@pytest.mark.extension("converters")
def test_a_folder_without_weights_says_what_it_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "global_step_4" / "actor").mkdir(parents=True)
    assert convert(tmp_path, None) == 1
    assert "there is no model.safetensors, no model_world_size_W" in capsys.readouterr().out


def test_a_folder_without_checkpoints_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tmp_path, None) == 1
    assert "holds no global_step_* folder" in capsys.readouterr().err
    assert convert(tmp_path / "none", None) == 1
    assert "does not exist" in capsys.readouterr().err
    assert convert(Path("//"), None) == 1  # as of two variables that are not set
    assert "is the root of all files" in capsys.readouterr().err

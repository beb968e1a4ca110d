"""Where a path in the YAML lies."""

from __future__ import annotations

import os
import re

import pytest

from tests.config.made import write_model
from trireme.config.lookup import located, model_facts, names_in


def test_a_path_is_local_or_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert located("openai/gsm8k", "datasets") is None
    assert located(str(tmp_path), "models") == tmp_path
    (tmp_path / "models").mkdir()
    for missing in ("./x", "/x/y", "a/b/c", "rows.jsonl", "models/mine"):
        with pytest.raises(ValueError, match="is not a file or folder here"):
            located(missing, "models")
    snapshot = tmp_path / "hub" / "models--gpt2" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert located("gpt2", "models") == snapshot


def test_experts_are_found_under_the_names_of_both_kinds_of_files():
    qwen, mixtral = "l.0.mlp.experts.{}.{}.weight", "l.0.block_sparse_moe.experts.{}.{}.weight"
    parts = ("gate_proj", "up_proj", "down_proj")
    files = {qwen.format(n, part) for n in range(2) for part in parts}
    assert names_in(files, "l.0.mlp.experts.gate_up_proj") == [
        [qwen.format(n, "gate_proj"), qwen.format(n, "up_proj")] for n in range(2)
    ]
    assert names_in(files, "l.0.mlp.experts.down_proj") == [
        [qwen.format(n, "down_proj")] for n in range(2)
    ]
    files = {mixtral.format(n, part) for n in range(3) for part in ("w1", "w2", "w3")}
    files.add("l.0.block_sparse_moe.gate.weight")
    assert names_in(files, "l.0.mlp.experts.gate_up_proj") == [
        [mixtral.format(n, "w1"), mixtral.format(n, "w3")] for n in range(3)
    ]
    assert names_in(files, "l.0.mlp.gate.weight") == "l.0.block_sparse_moe.gate.weight"
    # dense layers, what lies there as the model has it, and what does not lie there
    assert (
        names_in({"l.0.mlp.up_proj.weight"}, "l.0.mlp.up_proj.weight") == "l.0.mlp.up_proj.weight"
    )
    fused = "l.0.mlp.experts.gate_up_proj"
    assert names_in({*files, fused}, fused) == fused
    assert names_in(files, "lm_head.weight") == "lm_head.weight"


def test_tensors_of_composites_are_found_under_older_names() -> None:
    outer = {"language_model.model.norm.weight", "language_model.lm_head.weight", "vision.a.bias"}
    assert names_in(outer, "model.language_model.norm.weight") == "language_model.model.norm.weight"
    assert names_in(outer, "lm_head.weight") == "language_model.lm_head.weight"
    assert names_in(outer, "model.vision.a.bias") == "vision.a.bias"
    beside = {"model.norm.weight", "visual.norm.weight", "lm_head.weight"}
    assert names_in(beside, "model.language_model.norm.weight") == "model.norm.weight"
    assert names_in(beside, "model.visual.norm.weight") == "visual.norm.weight"
    assert names_in(beside, "lm_head.weight") == "lm_head.weight"


def test_what_is_no_models_folder_is_answered_with_the_nearest_one(tmp_path) -> None:
    model = write_model(tmp_path / "job/grpo/global_step_4/actor/huggingface")
    (tmp_path / "job/sft/global_step_2").mkdir(parents=True)
    os.utime(tmp_path / "job/sft/global_step_2", (1, 1))
    (tmp_path / "empty").mkdir()
    wanted = f"expected a folder in the Hugging Face layout; did you mean '{model}'?"
    for path, what in (
        (tmp_path / "job", "holds no config.json"),
        (tmp_path / "job/grpo", "holds no config.json"),
        (model / "model.safetensors", "is a file"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{what}: {wanted}")):
            model_facts(str(path))
    with pytest.raises(ValueError, match=r"layout$"):
        model_facts(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("missing", "near"),
    [
        ("arithmatic_assets/model", "arithmetic_assets"),
        ("retry_assets/model", None),
        ("arithmetic_assets/seed_1/model", None),
        ("arithmetic_assets/seed_0/rowz.jsonl", "arithmetic_assets/seed_0/rows.jsonl"),
        ("arithmetic_assets/seed_0/train_rows.jsonl", "arithmetic_assets/seed_0/rows.jsonl"),
    ],
)
def test_a_missing_path_is_answered_with_a_similar_one_not_with_another_example_s(
    tmp_path, missing, near
) -> None:
    (tmp_path / "arithmetic_assets/seed_0").mkdir(parents=True)
    (tmp_path / "arithmetic_assets/seed_0/rows.jsonl").touch()
    with pytest.raises(ValueError, match="is not a file or folder here") as raised:
        located(str(tmp_path / missing), "datasets")
    said = str(raised.value)
    assert said.endswith(f"; did you mean '{tmp_path / near}'?" if near else "')")
    assert ("did you mean" in said) == bool(near)


def test_a_link_that_leads_nowhere_is_named_with_its_target(tmp_path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("moved.jsonl")
    said = "is not a file or folder here .'.*rows.jsonl' is a link to 'moved.jsonl', which leads no"
    with pytest.raises(ValueError, match=said):
        located(str(tmp_path / "rows.jsonl"), "datasets")

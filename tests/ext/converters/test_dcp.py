"""Distributed checkpoints: which pickles are read, boxes of tensors, and Megatron's names."""

from __future__ import annotations

import os
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.models import random_model
from trireme.ext.converters.dcp import DistributedCheckpoint
from trireme.ext.converters.report import convert


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {a: random_model(folder / a, a, tie=a == "llama") for a in ("qwen2", "qwen3", "llama")}


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    return tmp_path / "global_step_1" / "actor"


class Call:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Call(), "it names posix.system"),
        (Fraction(1, 2), "it names fractions.Fraction"),
        ({"a": 1}, "it contains no metadata"),
    ],
)
def test_a_pickle_of_anything_else_is_refused_by_name(
    tmp_path: Path, value: Any, says: str
) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(ValueError, match=says):
        DistributedCheckpoint(tmp_path)


def test_a_cut_pickle_is_refused(tmp_path: Path) -> None:
    save({"a": torch.zeros(3)}, tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()
    for length in range(0, len(whole), 97):
        (tmp_path / ".metadata").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cannot be read"):
            DistributedCheckpoint(tmp_path)


def test_a_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    save({"a": torch.zeros(3)}, tmp_path)
    with (tmp_path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="not in its folder"):
        DistributedCheckpoint(tmp_path)


def test_a_box_is_read_and_cast(tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    save({"a": whole}, tmp_path)
    out = torch.empty(2, 2, 3, dtype=torch.bfloat16)
    DistributedCheckpoint(tmp_path).read("a", (1, 2, 0), out)
    assert torch.equal(out.float(), whole[1:, 2:, :3])


def test_a_box_past_the_end_says_how_much_there_is(tmp_path: Path) -> None:
    save({"a": torch.zeros(3, 4)}, tmp_path)
    with pytest.raises(ValueError, match="has only 4 of 8 elements of a"):
        DistributedCheckpoint(tmp_path).read("a", (2, 0), torch.empty(2, 4))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_layers_by_number_with_norms_of_their_own(
    models: dict[str, Path], actor: Path, arch: str, prefix: str
) -> None:
    """The local layer's names, which older Megatron versions store; an optimizer beside them."""
    state = {prefix + name: tensor for name, tensor in megatron(models[arch]).items()}
    state |= {f"optimizer.state.exp_avg.{name}": torch.zeros_like(t) for name, t in state.items()}
    save(state, actor / "dist_ckpt")
    assert convert([actor], models[arch], "auto") == 0
    after = load_file(actor / "huggingface" / "model.safetensors")
    before = load_file(models[arch] / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_does_not_fit_the_configuration_is_named(
    models: dict[str, Path], actor: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = "decoder.layers.0."
    qkv, fc2 = layer + "self_attention.linear_qkv.weight", layer + "mlp.linear_fc2.weight"
    harms: list[tuple[dict[str, Tensor | None], str]] = [
        ({qkv: torch.zeros(65, 32)}, f"{qkv} is [65, 32]; config.json implies [64, 32]"),
        ({fc2: None}, f"has no {fc2} or decoder.layers.mlp.linear_fc2.weight, which model.l"),
        ({"decoder.layers.4.mlp.linear_fc2.weight": torch.zeros(1)}, "has decoder.layers.4.mlp"),
        ({"output_layer.weight": torch.zeros(99, 32)}, "implies [100, 32] or longer"),
        ({"embedding.word_embeddings.weight": None}, "it holds no GPT model"),
    ]
    for number, (harm, says) in enumerate(harms):
        folder = actor.parent.parent / str(number) / "global_step_1"
        state = megatron(models["qwen2"]) | harm
        save({n: t for n, t in state.items() if t is not None}, folder / "actor" / "dist_ckpt")
        assert convert([folder], models["qwen2"]) == 1
        assert says in capsys.readouterr().out
        assert not list(folder.rglob("*.safetensors"))


def test_a_missing_data_file_is_named(
    models: dict[str, Path], actor: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(megatron(models["qwen2"]), actor / "dist_ckpt")
    [data] = (actor / "dist_ckpt").glob("*.distcp")
    data.unlink()
    assert convert([actor], models["qwen2"]) == 1
    assert data.name in capsys.readouterr().out


def test_another_format_is_named(
    models: dict[str, Path], actor: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (actor / "dist_ckpt").mkdir(parents=True)
    (actor / "dist_ckpt" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert convert([actor], models["qwen2"]) == 1
    assert "says sharded_backend 'zarr'" in capsys.readouterr().out


def save(state: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dcp_save(state, checkpoint_id=folder, no_dist=True)


def megatron(model: Path) -> dict[str, Tensor]:
    """A model's weights under Megatron's names: four groups of two query heads, norms apart."""
    hf = load_file(model / "model.safetensors")
    state = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        state["output_layer.weight"] = torch.cat([hf["lm_head.weight"], torch.ones(28, 32)])
    for layer in range(4):
        old, new = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for ours, theirs in (
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "pre_mlp_layernorm"),
            ("mlp.down_proj", "mlp.linear_fc2"),
            ("self_attn.o_proj", "self_attention.linear_proj"),
            ("self_attn.q_norm", "self_attention.q_layernorm"),
            ("self_attn.k_norm", "self_attention.k_layernorm"),
        ):
            if f"{old}{ours}.weight" in hf:
                state[f"{new}{theirs}.weight"] = hf[f"{old}{ours}.weight"]
        halves = [hf[f"{old}mlp.{half}_proj.weight"] for half in ("gate", "up")]
        state[f"{new}mlp.linear_fc1.weight"] = torch.cat(halves)
        for kind in ("weight", "bias"):
            if f"{old}self_attn.q_proj.{kind}" in hf:
                q, k, v = (hf[f"{old}self_attn.{p}_proj.{kind}"] for p in "qkv")
                heads = zip(q.chunk(4), k.chunk(4), v.chunk(4), strict=True)
                state[f"{new}self_attention.linear_qkv.{kind}"] = torch.cat(
                    [torch.cat(group) for group in heads]
                )
    return state

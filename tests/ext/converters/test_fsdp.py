"""FSDP shards, written by torch's FSDP2 on several gloo ranks, as Hugging Face models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.models import random_model
from tests.ext.converters.write_fsdp import write_fsdp
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import load_checkpoint, read_manifest, write_manifest
from trireme.checkpoint.save import copy_model_files, write_weights
from trireme.ext.converters.fsdp import FsdpShards, find_shards
from trireme.ext.converters.report import convert

VOCAB = 101  # no two ranks hold as many rows


@pytest.fixture(scope="module", params=[(2,), (2, 2)], ids=["fsdp", "hsdp"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    model = random_model(folder / "model", "qwen2", tie=len(request.param) == 1, vocab=VOCAB)
    write_fsdp(model, folder / "global_step_3" / "actor", request.param)
    return folder


@pytest.fixture
def step(written: Path, tmp_path: Path) -> Path:
    """A copy to convert, and to damage."""
    shutil.copytree(written / "global_step_3", tmp_path / "global_step_3")
    return tmp_path / "global_step_3"


def test_shards_compute_what_the_model_did(written: Path, step: Path) -> None:
    assert convert([step], written / "model", "float32") == 0
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(written / "model")(ids).logits
        after = AutoModelForCausalLM.from_pretrained(step / "actor" / "huggingface")(ids).logits
    assert torch.equal(before, after)


def test_they_become_bfloat16_in_files_of_the_size_asked_for(
    written: Path, step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert([step / "actor"], written / "model", max_shard_gb=2e-5) == 0
    hf = step / "actor" / "huggingface"
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 2
    found = {name: tensor for file in files for name, tensor in load_file(hf / file).items()}
    wanted = load_file(written / "model" / "model.safetensors")
    assert found.keys() == wanted.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], wanted[name].bfloat16()) for name in wanted)
    assert sum(2 * tensor.numel() for tensor in found.values()) == index["metadata"]["total_size"]
    AutoModelForCausalLM.from_pretrained(hf)
    capsys.readouterr()
    assert convert([step]) == 0
    assert "1 complete already" in capsys.readouterr().out
    (hf / files[1]).unlink()
    assert convert([step]) == 0
    assert "1 exported" in capsys.readouterr().out
    assert [path.name for path in hf.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("missing", "rank_1.pt is missing"),
        ("cut", "rank_1.pt is damaged"),
        ("layer", "model.layers.4.self_attn.q_proj.weight is missing in the checkpoint"),
        ("shape", "is [101, 32] in the checkpoint"),
        ("worlds", "has shards of world sizes"),
        ("foreign", "it holds a fractions.Fraction; expected tensors"),
    ],
)
def test_what_is_wrong_is_named(
    written: Path, step: Path, capsys: pytest.CaptureFixture[str], harm: str, says: str
) -> None:
    [path] = (step / "actor").glob("*rank_1.pt")
    config = json.loads((written / "model" / "config.json").read_text())
    if harm == "missing":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-900])
    elif harm == "layer":
        config |= {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    elif harm == "shape":
        config["vocab_size"] = VOCAB + 1
    elif harm == "worlds":
        shutil.copy(path, path.with_name("model_world_size_8_rank_0.pt"))
    else:
        from fractions import Fraction

        torch.save({"a": Fraction(1, 2)}, path)
    hf = step / "actor" / "huggingface"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps(config))
    assert convert([step]) == 1
    assert says in capsys.readouterr().out
    assert not list(hf.glob("*.safetensors"))


def test_one_of_several_that_fails_leaves_the_others(
    written: Path, step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = step.with_name("global_step_4")
    shutil.copytree(step, broken)
    next((broken / "actor").glob("*rank_0.pt")).write_bytes(b"")
    assert convert([step.parent], written / "model") == 1
    out = capsys.readouterr().out
    assert "1 exported, 0 complete already, 1 failed" in out and f"failed    {broken}" in out


def test_plain_tensors_are_parts_along_the_first_dimension(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", "llama", tie=False, vocab=VOCAB)
    actor = write_fsdp(model, tmp_path / "global_step_1" / "actor", (2,), plain=True)
    assert convert([tmp_path], model, "auto") == 0
    after = load_file(actor / "huggingface" / "model.safetensors")
    before = load_file(model / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_plain_tensors_that_are_whole_in_each_rank_are_copies(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"a": torch.arange(6.0).view(2, 3)}, shard(tmp_path, 2, rank))
    for expected, shape in (({"a": (2, 3)}, (2, 3)), (None, (4, 3))):
        shards = FsdpShards(find_shards(tmp_path), expected)
        assert shards.specs["a"].shape == shape
        out = torch.empty(shape)
        shards.fill("a", out)
        assert torch.equal(out[:2], torch.arange(6.0).view(2, 3))
        assert torch.equal(out[-2:], out[:2])


def test_shards_of_a_rank_along_any_dimension(tmp_path: Path) -> None:
    """Uneven: 5 columns over 3 ranks are 2, 2 and 1; over 4, 2, 2, 1 and none."""
    whole = torch.arange(15.0).view(3, 5)
    for world in (3, 4):
        folder = tmp_path / str(world)
        folder.mkdir()
        for rank in range(world):
            torch.save({"a": sharded(whole, 1, world, rank)}, shard(folder, world, rank))
        shards = FsdpShards(find_shards(folder))
        out = torch.empty(3, 5, dtype=torch.float64)
        shards.fill("a", out)
        assert torch.equal(out, whole.double())


def test_the_world_size_of_fsdp_config_counts(tmp_path: Path) -> None:
    for world in (1, 2):
        for rank in range(world):
            shard(tmp_path, world, rank).touch()
    (tmp_path / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    assert find_shards(tmp_path) == [shard(tmp_path, 2, 0), shard(tmp_path, 2, 1)]


def shard(folder: Path, world: int, rank: int) -> Path:
    return folder / f"model_world_size_{world}_rank_{rank}.pt"


def sharded(whole: torch.Tensor, dim: int, world: int, rank: int) -> torch.Tensor:
    """What a rank holds, as a DTensor made without any other rank."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", torch.arange(world))
        parts = whole.chunk(world, dim)
        empty = whole.narrow(dim, 0, 0)
        local = (parts[rank] if rank < len(parts) else empty).contiguous()
        return DTensor.from_local(
            local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_export_that_was_deleted_is_made_again_as_the_manifest_lists_it(
    written: Path, step: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = step / "actor" / "huggingface"
    hf.mkdir()
    copy_model_files(written / "model", hf)
    weights = load_file(written / "model" / "model.safetensors")
    write_weights(hf / "model.safetensors", {n: t.to(dtype) for n, t in weights.items()})
    write_manifest(step, 3, {"version": 1, "buffer": {}})
    before = [path.read_bytes() for path in (hf / "model.safetensors", step / "manifest.json")]
    (hf / "model.safetensors").unlink()
    assert convert([step]) == 0
    assert [p.read_bytes() for p in (hf / "model.safetensors", step / "manifest.json")] == before
    assert convert([step]) == 0
    assert "1 complete already" in capsys.readouterr().out
    loaded = load_checkpoint(JobFolder(step.parent))
    assert loaded is not None and loaded.step == 3

    # in a dtype that is asked for the step stays whole, too
    (hf / "model.safetensors").unlink()
    other = "float32" if dtype != torch.float32 else "bfloat16"
    assert convert([step], None, other) == 0
    assert "manifest lists from now on" in capsys.readouterr().out
    assert load_file(hf / "model.safetensors")["model.norm.weight"].dtype == getattr(torch, other)
    read_manifest(step, 3)
    assert convert([step]) == 0
    (hf / "model.safetensors").unlink()
    assert convert([step], None, None, max_shard_gb=2e-5) == 0  # the former dtype, in one file
    read_manifest(step, 3)
    assert load_file(hf / "model.safetensors")["model.norm.weight"].dtype == getattr(torch, other)

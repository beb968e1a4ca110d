"""Loading: each rank reads its own rows, and nobody holds the model whole."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2Config

from tests.tiny import make_model
from tests.trainer.ranks import run
from tests.trainer.samples import backend_of
from trireme.trainer.empty import empty_model
from trireme.trainer.lora import Lora
from trireme.trainer.ranks import Ranks, RankSpec, whole

MB = 2**20


def _status(name: str) -> int:
    """Bytes of a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def _loads(place: RankSpec, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    ranks = Ranks(place)
    if "lora" in given:
        import_module("peft")  # whose code is not the model's
    Path("/proc/self/clear_refs").write_text("5")  # the highest size is that of now
    before = _status("VmRSS")
    backend = backend_of(folder, ranks, **given)
    peak = _status("VmHWM") - before
    weights = {name: tensor.clone() for name, tensor in backend.each_weight()}
    ranks.close()
    return {"peak": peak, "weights": weights if place.rank == 0 else {}}


def _begun(place: RankSpec, folder: Path, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    ranks = Ranks(place)
    backend = backend_of(folder, ranks, **given)
    weights = {name: whole(tensor).clone() for name, tensor in backend.module.state_dict().items()}
    ranks.close()
    return weights


def middling(folder: Path, kind: str) -> Path:
    """Some 200 MB in float32, of which a block is 17, or of the mixture 67."""
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 300,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    if kind == "mixtral":
        sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2}
        config = MixtralConfig(intermediate_size=1344, num_hidden_layers=3, **sizes)
    else:
        config = Qwen2Config(intermediate_size=2048, num_hidden_layers=12, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("kind", "block"), [("qwen2", 17), ("adapted", 17), ("mixtral", 67)])
def test_a_rank_holds_its_share_and_a_block(kind: str, block: int, tmp_path: Path) -> None:
    folder = middling(tmp_path / "model", kind)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = {name: tensor.detach() for name, tensor in model.named_parameters()}
    whole = sum(tensor.nbytes for tensor in expected.values())
    given = {"lora": Lora(rank=4)} if kind == "adapted" else {}
    found = run(_loads, tmp_path / "ranks", folder, given, world=4)
    assert {name: torch.equal(found[0]["weights"][name], w) for name, w in expected.items()} == (
        dict.fromkeys(expected, True)
    )
    first, *others = [each["peak"] for each in found]
    assert max(others) < whole / 4 + (block + 20) * MB, [each["peak"] / MB for each in found]
    if kind != "mixtral":  # it also proves a specimen of two blocks, of the mixture nearly all
        assert first < whole / 4 + (3 * block + 20) * MB, first / MB


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rows_are_those_of_the_folder(arch: str, dtype: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", arch, tie=arch == "qwen3")
    expected = backend_of(folder).weights()
    assert empty_model(folder) is not None
    given = {"reference": True, "dtype": dtype}
    found, _ = run(_loads, tmp_path / "ranks", folder, given)
    for name, weight in expected.items():
        assert torch.equal(found["weights"][name], weight), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapters_base_is_read_by_rows_too(dtype: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", tie=True)
    given = {"lora": Lora(rank=4), "dtype": dtype}
    expected = backend_of(folder, **given)
    found, _ = run(_begun, tmp_path / "ranks", folder, given)
    assert set(found) == set(expected.module.state_dict())
    for name, weight in expected.module.state_dict().items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name


def test_files_with_other_names_are_converted_whole(tiny_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_dir).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({f"base.{k}": v for k, v in load_file(file).items()}, file, {"format": "pt"})
    assert empty_model(folder) is None
    assert empty_model(tiny_dir) is not None

"""Loading: each rank reads its own rows, and nobody holds the model whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.tiny import make_model
from tests.trainer.ranks import run
from tests.trainer.samples import backend_of
from trireme.trainer.model import empty_model
from trireme.trainer.ranks import Ranks, RankSpec

MB = 2**20


def _status(name: str) -> int:
    """Bytes of a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def _loads(place: RankSpec, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    ranks = Ranks(place)
    Path("/proc/self/clear_refs").write_text("5")  # the highest size is that of now
    before = _status("VmRSS")
    backend = backend_of(folder, ranks, **given)
    peak = _status("VmHWM") - before
    weights = {name: tensor.clone() for name, tensor in backend.each_weight()}
    ranks.close()
    return {"peak": peak, "weights": weights if place.rank == 0 else {}}


def middling(folder: Path) -> Path:
    """200 MB in float32, of which a block is 17."""
    config = Qwen2Config(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=300,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_rank_holds_its_share_and_a_block(tmp_path: Path) -> None:
    folder = middling(tmp_path / "model")
    expected = load_file(folder / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in expected.values())
    found = run(_loads, tmp_path / "ranks", folder, {}, world=4)
    assert {name: torch.equal(found[0]["weights"][name], w) for name, w in expected.items()} == (
        dict.fromkeys(expected, True)
    )
    first, *others = [each["peak"] for each in found]
    assert max(others) < whole / 4 + 17 * MB + 20 * MB, [each["peak"] / MB for each in found]
    assert first < whole / 2  # it also proves two layers


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rows_are_those_of_the_folder(arch: str, dtype: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", arch, tie=arch == "qwen3")
    expected = backend_of(folder).weights()
    assert empty_model(folder) is not None
    given = {"reference": True, "dtype": dtype}
    found, _ = run(_loads, tmp_path / "ranks", folder, given)
    for name, weight in expected.items():
        assert torch.equal(found["weights"][name], weight), name


def test_files_with_other_names_are_converted_whole(tiny_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_dir).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({f"base.{k}": v for k, v in load_file(file).items()}, file, {"format": "pt"})
    assert empty_model(folder) is None
    assert empty_model(tiny_dir) is not None

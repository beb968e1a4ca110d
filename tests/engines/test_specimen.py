"""The specimen of an architecture, and what is chosen by it: no weights, and no chance, decide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from tests.tiny import make_tokenizer
from trireme.engines.torch.shell import load_shell
from trireme.engines.torch.specimen import VOCABULARY, make_specimen
from trireme.trainer.model import load_model

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def trained(folder: Path) -> Path:
    """A model that amplifies rounding: attention in many layers is all but tied between tokens."""
    torch.manual_seed(0)
    sizes = {**SMALL, "num_hidden_layers": 40}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, initializer_range=0.4))
    with torch.no_grad():
        for block in model.base_model.layers:
            block.self_attn.q_proj.weight.mul_(30)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.extension("fast_engine")
def test_a_model_that_amplifies_rounding_is_trained_and_decoded_like_any_other(
    tmp_path: Path,
) -> None:
    """Two right forward passes differ on it by 27 times what was allowed to them when they were
    compared on a run's own weights: so a resume decoded by another one than its run before."""
    folder = trained(tmp_path)
    model = load_model(folder, device="cpu")
    assert model.config._attn_implementation == "trireme_packed"
    from trireme.ext.fast_engine.lean import make_lean

    assert make_lean(load_shell(folder, device="cpu", dtype="float32")) is not None


def test_a_specimen_shows_every_kind_of_layer_and_leaves_a_runs_draws_alone() -> None:
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    sizes = {**SMALL, "vocab_size": 9000, "pad_token_id": 8999}
    config = Gemma3TextConfig(layer_types=kinds, head_dim=8, **sizes)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = make_specimen(config)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(6)
    again = make_specimen(config)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    assert model.config.layer_types == kinds
    assert model.config.vocab_size == VOCABULARY and config.vocab_size == 9000
    few = make_specimen(LlamaConfig(**{**SMALL, "num_hidden_layers": 1}))
    assert few.config.num_hidden_layers == 1


def test_a_specimen_has_layers_of_the_folders_widths(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(trained(tmp_path))
    model, whole = make_specimen(config), AutoModelForCausalLM.from_pretrained(tmp_path)
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    assert all(shapes[name] == tensor.shape for name, tensor in model.state_dict().items())
    assert {name.split(".")[2] for name in model.state_dict() if ".layers." in name} == {"0", "1"}


_PRODUCTS = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
x, w = torch.randn(3, 576), torch.randn(576, 576)


def at(offset, t):
    whole = torch.empty(t.numel() + 32)
    first = (offset - whole.data_ptr() // 4) % 16
    place = whole[first : first + t.numel()].view_as(t)
    return place.copy_(t)


for rows in (1, 2, 3):
    expected = F.linear(at(0, x[:rows]), at(0, w))
    for offset in range(1, 16):
        print(*(
            float((F.linear(at(a, x[:rows]), at(b, w)) - expected).abs().max())
            for a, b in ((offset, 0), (0, offset))
        ))
"""


def test_a_product_does_not_depend_on_where_its_factors_lie() -> None:
    """MKL sums few rows in an order that depends on addresses, which differ between a run and its
    resume; a deterministic run asks it not to."""
    from trireme.launch.models import FIXED_SUMS

    done = subprocess.run(
        [sys.executable, "-c", _PRODUCTS],
        env={**os.environ, **FIXED_SUMS["cpu"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert {float(word) for word in done.stdout.split()} == {0.0}

"""Export holds one tensor at a time: how much memory a conversion takes, measured in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import LlamaConfig

from tests.limits import HANG_S

LAYERS, WIDTH = 10, 1024
CONFIG = LlamaConfig(
    hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS, vocab_size=4000,
    num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
)  # fmt: skip
MEASURE = """
import sys
from pathlib import Path
from trireme.ext.converters import fsdp
from trireme.ext.converters.convert import expected_shapes
from trireme.ext.converters.report import convert

def peak():  # not getrusage, which counts the process that this one was forked from
    [line] = [x for x in open("/proc/self/status") if x.startswith("VmHWM")]
    return int(line.split()[1])

expected_shapes(Path(sys.argv[2]) / "config.json")  # what comes before any tensor
fsdp.MAPPED_BYTES //= 4
before = peak()
assert convert([Path(sys.argv[1])], Path(sys.argv[2]), "auto") == 0
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_converting_takes_half_of_a_models_size_at_most(tmp_path: Path, kind: str) -> None:
    """0.56 GB in float32: 64 MiB of it are mapped at most, and one tensor is held."""
    CONFIG.save_pretrained(tmp_path / "base")
    actor = tmp_path / "global_step_1" / "actor"
    actor.mkdir(parents=True)
    (write_shards if kind == "fsdp" else write_distributed)(actor)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), str(tmp_path / "base")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[-1]) * 1024
    size = (actor / "huggingface" / "model.safetensors").stat().st_size
    assert size > 5.5e8
    assert peak < size / 2, json.dumps({"kind": kind, "peak": peak, "size": size})
    after = load_file(actor / "huggingface" / "model.safetensors")
    assert all(bool((tensor == 1).all()) for tensor in after.values())


def shapes() -> dict[str, tuple[int, ...]]:
    from trireme.ext.converters.convert import _shapes_of

    found = _shapes_of(json.dumps(CONFIG.to_dict() | {"model_type": "llama"}))
    assert found is not None
    return found


def write_shards(actor: Path) -> None:
    """Four ranks' parts along the first dimension."""
    parts = {n: torch.ones(s[0] // 4, *s[1:]) for n, s in shapes().items()}
    for rank in range(4):
        torch.save(parts, actor / f"model_world_size_4_rank_{rank}.pt")


def write_distributed(actor: Path) -> None:
    """Layers by number."""
    wide = 3 * WIDTH
    dcp_save(
        {
            "embedding.word_embeddings.weight": torch.ones(4096, WIDTH),
            "decoder.final_layernorm.weight": torch.ones(WIDTH),
        }
        | {
            f"decoder.layers.{layer}.{name}": torch.ones(shape)
            for layer in range(LAYERS)
            for name, shape in {
                "self_attention.linear_qkv.layer_norm_weight": (WIDTH,),
                "self_attention.linear_qkv.weight": (wide, WIDTH),
                "self_attention.linear_proj.weight": (WIDTH, WIDTH),
                "mlp.linear_fc1.layer_norm_weight": (WIDTH,),
                "mlp.linear_fc1.weight": (2 * wide, WIDTH),
                "mlp.linear_fc2.weight": (WIDTH, wide),
            }.items()
        },
        checkpoint_id=actor / "dist_ckpt",
        no_dist=True,
    )

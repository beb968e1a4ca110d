"""Adapter files: an adapter as vLLM reads it, from a folder in peft's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from trireme.engines.adapter import layers_of
from trireme.files import write_json


def write_adapter(folder: Path, adapter: Mapping[str, Tensor]) -> None:
    """Write it in peft's form: adapter_config.json, whose scale is 1, and
    adapter_model.safetensors.
    """
    from safetensors.torch import save_file

    layers = list(layers_of(adapter))
    rank = max(len(a) for _, a, _ in layers)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    targets = sorted({stem.rpartition(".")[2] for stem, _, _ in layers})
    ranks = {stem: len(a) for stem, a, _ in layers if len(a) != rank}
    patterns = {"rank_pattern": ranks, "alpha_pattern": ranks}
    write_json(folder / "adapter_config.json", config | {"target_modules": targets} | patterns)
    tensors = {f"base_model.model.{n}": t.cpu().contiguous() for n, t in adapter.items()}
    save_file(tensors, folder / "adapter_model.safetensors")

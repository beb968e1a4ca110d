"""Adapter: LoRA weights that a trainer sends, merged into the full ones they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."


def merge_adapter(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """W + scale B A for every adapted weight, the others as they are (LoRA, arXiv:2106.09685).

    Names and `config` (`r`, `lora_alpha`, `use_rslora`, `fan_in_fan_out`) are peft's. scale is
    alpha / r, or alpha / sqrt(r). Raises ValueError for an adapter of another model or kind.
    """
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        if rank < 1:
            raise ValueError("r is no rank")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the adapter's configuration needs 'r' and 'lora_alpha', numbers above 0: {error}"
        ) from error
    scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
    if config.get("use_dora") or config.get("rank_pattern") or config.get("alpha_pattern"):
        raise ValueError("the adapter uses DoRA or ranks of its own for some layers: not supported")
    merged = dict(base)
    odd = [name for name in adapter if not name.endswith((_A, _B))]
    if odd:
        raise ValueError(f"the adapter has '{odd[0]}': expected names that end in {_A} or {_B}")
    for name, a in adapter.items():
        if not name.endswith(_A):
            continue
        stem = name.removesuffix(_A)
        target = f"{stem.removeprefix(_PREFIX)}.weight"
        if target not in base or stem + _B not in adapter:
            raise ValueError(f"the adapter's '{name}' has no {_B[1:]} beside it, or no {target}")
        b = adapter[stem + _B]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ValueError(
                f"the adapter's '{stem}' has A {list(a.shape)} and B {list(b.shape)}: expected "
                "[r, in] and [out, r]"
            )
        change = scale * (b.double() @ a.double())
        if config.get("fan_in_fan_out"):
            change = change.T
        whole = base[target]
        if change.shape != whole.shape:
            raise ValueError(
                f"the adapter's '{stem}' is {list(change.shape)}: expected {list(whole.shape)}"
            )
        merged[target] = (whole.double() + change).to(whole.dtype)
    return merged


def base_weights(model_path: str) -> dict[str, Tensor]:
    """The full weights of a model's folder."""
    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_path} holds no safetensors file that an adapter could belong to")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}

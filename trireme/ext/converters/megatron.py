"""Megatron checkpoints: reads a GPT model in torch_dist format by Hugging Face names.

How many ranks wrote it, and how they split the model, does not matter: the format stores whole
tensors in pieces. Layers are stored by number, or stacked along a first dimension. Fused there:

- linear_qkv: for each key/value head its query heads, then its key, then its value.
- linear_fc1: the gate's rows, then the up projection's.
- layer norms: named as parts of the linear layer after them, or by themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trireme.checkpoint.export import Spec
from trireme.config.lookup import Shape
from trireme.ext.converters.dcp import METADATA, DistributedCheckpoint

MODEL_TYPES = ("llama", "qwen2", "qwen3")

_ATTENTION, _MLP = "self_attention.linear_qkv", "mlp.linear_fc1"
_LAYER: dict[str, tuple[tuple[str, str], ...]] = {
    "input_layernorm.weight": (
        (f"{_ATTENTION}.layer_norm_weight", "all"),
        ("input_layernorm.weight", "all"),
    ),
    "post_attention_layernorm.weight": (
        (f"{_MLP}.layer_norm_weight", "all"),
        ("pre_mlp_layernorm.weight", "all"),
    ),
    "self_attn.o_proj.weight": (("self_attention.linear_proj.weight", "all"),),
    "self_attn.o_proj.bias": (("self_attention.linear_proj.bias", "all"),),
    "self_attn.q_norm.weight": (("self_attention.q_layernorm.weight", "all"),),
    "self_attn.k_norm.weight": (("self_attention.k_layernorm.weight", "all"),),
    "mlp.gate_proj.weight": ((f"{_MLP}.weight", "first half"), (f"{_MLP}.weight_w", "all")),
    "mlp.up_proj.weight": ((f"{_MLP}.weight", "second half"), (f"{_MLP}.weight_v", "all")),
    "mlp.down_proj.weight": (("mlp.linear_fc2.weight", "all"),),
} | {
    f"self_attn.{part}_proj.{kind}": ((f"{_ATTENTION}.{kind}", part),)
    for part in "qkv"
    for kind in ("weight", "bias")
}
"""A layer's tensors: the possible names of each, and the part of that tensor."""

_MODEL = {
    "model.embed_tokens.weight": ("embedding.word_embeddings.weight", "rows"),
    "model.norm.weight": ("decoder.final_layernorm.weight", "all"),
    "lm_head.weight": ("output_layer.weight", "rows"),
}
_NAME = re.compile(r"^model\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class _Slice:
    """The location of a tensor: a stored tensor, its layer if it is stacked, and a part of that."""

    stored: str
    layer: int | None
    piece: str


def find_megatron(actor: Path) -> Path | None:
    """Find the folder of a distributed checkpoint in or under a folder; the last iteration's."""
    for root in (actor, actor / "dist_ckpt"):
        iterations = sorted(root.glob("iter_*"), key=lambda p: (len(p.name), p.name))
        for folder in (root, *reversed(iterations)):
            if (folder / METADATA).is_file():
                return folder
            kind = folder / "metadata.json"
            facts = json.loads(kind.read_text(encoding="utf-8")) if kind.is_file() else {}
            if "sharded_backend" in facts:
                raise ValueError(
                    f"{kind} says sharded_backend '{facts['sharded_backend']}', and there is no "
                    f"{METADATA}: expected a whole checkpoint in the format 'torch_dist'"
                )
    return None


class MegatronReader:
    """The reader of Megatron's distributed checkpoints."""

    form = f"distributed checkpoint ({METADATA})"
    mark = METADATA
    beside_own = False

    def find(self, folder: Path) -> list[Path]:
        """Return the metadata of the last iteration."""
        found = find_megatron(folder)
        return [] if found is None else [found / METADATA]

    def open(
        self, files: Sequence[Path], config: Mapping[str, Any], expected: Mapping[str, Shape] | None
    ) -> MegatronWeights:
        """Open the checkpoint."""
        return MegatronWeights(files[0].parent, config, expected or {})


class MegatronWeights:
    """A Megatron model's tensors as Hugging Face's."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], expected: Mapping[str, Shape]
    ) -> None:
        """`config` is the model's config.json; `expected` its tensors' shapes."""
        if config.get("model_type") not in MODEL_TYPES:
            raise ValueError(
                f"model_type '{config.get('model_type')}' is not converted from Megatron; "
                f"expected one of {', '.join(MODEL_TYPES)}"
            )
        self._checkpoint = DistributedCheckpoint(folder)
        self._heads = int(config["num_attention_heads"])
        self._groups = int(config.get("num_key_value_heads") or self._heads)
        self._layers = int(config["num_hidden_layers"])
        self._prefix = self._find_prefix()
        self._fused: dict[tuple[str, int | None], Tensor] = {}
        self._slices = {name: self._slice(name) for name in expected}
        self._check_all_used(bool(config.get("tie_word_embeddings")))
        self.specs = {
            name: Spec(shape, self._checkpoint.dtype(self._slices[name].stored))
            for name, shape in expected.items()
        }

    def fill(self, name: str, out: Tensor) -> None:
        """Read a tensor's part of the stored one."""
        part = self._slices[name]
        if part.piece in ("q", "k", "v"):
            out.copy_(self._split(part, out))
            return
        shape = self._stored_shape(part)
        rows, wanted = shape[0], list(out.shape)
        whole = 2 * wanted[0] if part.piece.endswith("half") else wanted[0]
        fits = rows >= whole if part.piece == "rows" else rows == whole
        if not fits or list(shape[1:]) != wanted[1:]:
            raise self._misfit(part, [whole, *wanted[1:]])
        begin = wanted[0] if part.piece == "second half" else 0
        self._read(part, [begin, *[0] * (out.dim() - 1)], out)

    def _split(self, part: _Slice, out: Tensor) -> Tensor:
        """Return the query, key or value rows of a fused projection.

        The last two that were read are cached, a weight and its bias, for their other parts.
        """
        shape = self._stored_shape(part)
        heads = self._heads if part.piece == "q" else self._groups
        size = out.shape[0] // heads
        rows = (self._heads + 2 * self._groups) * size
        if shape[0] != rows or shape[1:] != tuple(out.shape[1:]):
            raise self._misfit(part, [rows, *out.shape[1:]])
        key = (part.stored, part.layer)
        if key not in self._fused:
            fused = torch.empty(shape, dtype=out.dtype)
            self._read(part, [0] * len(shape), fused)
            self._fused = dict([*self._fused.items()][-1:]) | {key: fused}
        queries = self._heads // self._groups
        grouped = self._fused[key].view(self._groups, queries + 2, size, *shape[1:])
        chosen = {"q": slice(0, queries), "k": slice(-2, -1), "v": slice(-1, None)}[part.piece]
        return grouped[:, chosen].reshape(out.shape)

    def _read(self, part: _Slice, begin: list[int], out: Tensor) -> None:
        if part.layer is None:
            self._checkpoint.read(part.stored, begin, out)
        else:
            self._checkpoint.read(part.stored, [part.layer, *begin], out[None])

    def _slice(self, name: str) -> _Slice:
        """Locate a Hugging Face tensor. Raises ValueError if nothing like it is stored."""
        if name in _MODEL:
            places = [_Slice(self._prefix + _MODEL[name][0], None, _MODEL[name][1])]
        else:
            match = _NAME.match(name)
            candidates = _LAYER.get(match[2], ()) if match else ()
            layer = int(match[1]) if match else 0
            layers = f"{self._prefix}decoder.layers."
            places = [_Slice(f"{layers}{layer}.{key}", None, piece) for key, piece in candidates]
            places += [_Slice(f"{layers}{key}", layer, piece) for key, piece in candidates]
        for part in places:
            if part.stored in self._checkpoint.tensors:
                self._check_stack(part)
                return part
        looked = " or ".join(candidate.stored for candidate in places) or "any tensor known for it"
        raise ValueError(f"{self._checkpoint.folder} has no {looked}, which {name} is made from")

    def _check_stack(self, part: _Slice) -> None:
        depth = self._checkpoint.shape(part.stored)[0]
        if part.layer is not None and depth != self._layers:
            raise ValueError(
                f"{self._checkpoint.folder}: {part.stored} has {depth} layers; "
                f"config.json says num_hidden_layers {self._layers}"
            )

    def _check_all_used(self, tied: bool) -> None:
        """Raise ValueError for an unused tensor: it would be missing in the model's computation."""
        used = {part.stored for part in self._slices.values()}
        used |= {f"{self._prefix}output_layer.weight"} if tied else set()
        ours = tuple(self._prefix + part for part in ("decoder.", "embedding.", "output_layer."))
        left = sorted(name for name in self._checkpoint.tensors if name.startswith(ours))
        left = [name for name in left if name not in used]
        if left:
            raise ValueError(
                f"{self._checkpoint.folder} has {left[0]}, which the model of config.json does "
                "not have"
            )

    def _find_prefix(self) -> str:
        """Return the prefix of the weights' names; an optimizer's copies have a longer one."""
        end = _MODEL["model.embed_tokens.weight"][0]
        names = [name for name in self._checkpoint.tensors if name.endswith(end)]
        if not names:
            raise ValueError(f"{self._checkpoint.folder} has no {end}: it holds no GPT model")
        return min(names, key=len).removesuffix(end)

    def _stored_shape(self, part: _Slice) -> Shape:
        shape = self._checkpoint.shape(part.stored)
        return shape if part.layer is None else shape[1:]

    def _misfit(self, part: _Slice, expected: list[int]) -> ValueError:
        return ValueError(
            f"{self._checkpoint.folder}: {part.stored} is {list(self._stored_shape(part))}; "
            f"config.json implies {expected}{' or longer' if part.piece == 'rows' else ''}"
        )

"""Adapter: the form in which a LoRA adapter is sent to engines that already have the base weights.

Its tensors are A [r, in] and B [out, r], and B includes the scale: the layer adds B A x. So one
form serves plain LoRA and rsLoRA, and layers of any rank, without a configuration. Engines
recognize it by its names: those of the base's layers, with `.lora_A.weight` and `.lora_B.weight`.

An embedded engine merges it into weights of its own, or adds its products to the outputs of layers
whose weights are the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trireme.engines.weights import refuse_unusable

A, B = ".lora_A.weight", ".lora_B.weight"

ENDS = {"lm_head", "embed_tokens"}
"""Layers outside the blocks; their adapters are pushed merged."""
BASE_LAYER, _ADDITION = ".base_layer.", ".lora_"
"""Parts of peft's names: of a base weight in a layer with an adapter, and of the adapter's own."""


def plain_name(key: str) -> str:
    """Return the name in the plain model of a base weight of an adapted one."""
    return key.replace(BASE_LAYER, ".")


def is_of_adapter(key: str) -> bool:
    """Return whether peft's name of a tensor is that of an adapter's, and not of its base."""
    return _ADDITION in key


def is_adapter(names: Iterable[str]) -> bool:
    """Return whether these names are an adapter's. Raises ValueError if only some are."""
    ends = {name.endswith((A, B)) for name in names}
    if len(ends) > 1:
        raise ValueError("these weights mix an adapter's tensors with a model's")
    return ends == {True}


def layers_of(adapter: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each layer's name with its A and B. Raises ValueError for one without the other."""
    stems = {name.removesuffix(A).removesuffix(B) for name in adapter}
    for stem in sorted(stems):
        pair = [adapter.get(stem + end) for end in (A, B)]
        a, b = pair
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
            shapes = [None if t is None else list(t.shape) for t in pair]
            raise ValueError(
                f"the adapter's '{stem}' has A {shapes[0]} and B {shapes[1]}: expected [r, in] "
                "and [out, r]"
            )
        yield stem, a, b


def merge(base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return base + B A, summed in float32 at least."""
    wide = torch.promote_types(base.dtype, torch.float32)
    return (base.to(wide) + b.to(base.device, wide) @ a.to(base.device, wide)).to(base.dtype)


def added(out: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the product B A x to a layer's output [..., out], in place; without gradients."""
    low = nn.functional.linear(x, a).flatten(0, -2)
    out.flatten(0, -2).addmm_(low, b.t())
    return out


class Added:
    """An adapter whose products are added to the outputs of a module's layers. The module's weights
    are the base of a trainer's adapter, which neither of them changes.
    """

    merges = False

    def __init__(self) -> None:
        self._adapter: dict[str, Tensor] = {}
        self._layers: list[tuple[Any, Any]] = []

    @torch.no_grad()
    def take(self, module: nn.Module, adapter: Mapping[str, Tensor]) -> None:
        """Add the products of a copy, in the layers' dtype, in place of the last adapter's. Raises
        ValueError, and changes nothing, if it belongs to another model, or has numbers that are not
        finite.
        """
        _refuse_other(module, adapter)
        self.forget()
        for stem, a, b in layers_of(adapter):
            layer: Any = module.get_submodule(stem)
            like = layer.weight
            a, b = (t.detach().to(like.device, like.dtype, copy=True) for t in (a, b))
            layer.addition = a, b  # also read by passes that call no layer
            self._layers.append((layer, layer.register_forward_hook(_add)))
            self._adapter |= {f"{stem}{A}": a, f"{stem}{B}": b}

    def forget(self) -> None:
        """Drop the adapter."""
        for layer, hook in self._layers:
            hook.remove()
            del layer.addition
        self._layers, self._adapter = [], {}

    def apart(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a module's state dict, and the adapter."""
        return {**weights, **self._adapter}


def _add(layer: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return added(out, inputs[0], *layer.addition)


def _refuse_other(module: nn.Module, adapter: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless an adapter is for layers of the module, with finite numbers."""
    refuse_unusable(adapter)
    own, turned = module.state_dict(), _transposed(module)
    for stem, a, b in layers_of(adapter):
        weight = own.get(f"{stem}.weight")
        shape, expected = (len(b), a.shape[1]), None if weight is None else tuple(weight.shape)
        if expected is not None and stem in turned:
            expected = expected[::-1]
        if shape != expected:
            raise ValueError(
                f"the adapter's '{stem}' is for weights of {shape}: this model's are {expected}"
            )


def _transposed(module: nn.Module) -> set[str]:
    """Return the names of layers whose weights are stored as [in, out]: GPT-2's."""
    return {name for name, layer in module.named_modules() if isinstance(layer, Conv1D)}


class Merged:
    """An adapter merged into a module's weights; the base weights are stored alongside."""

    merges = True

    def __init__(self) -> None:
        self._base: dict[str, Tensor] = {}
        self._adapter: dict[str, Tensor] = {}
        self._transposed: set[str] = set()

    @torch.no_grad()
    def take(self, module: nn.Module, adapter: Mapping[str, Tensor]) -> None:
        """Merge an adapter in place of the last one, in float32 at least. Raises ValueError, and
        changes nothing, if it belongs to another model, or has numbers that are not finite.
        """
        _refuse_other(module, adapter)
        self._transposed = _transposed(module)
        self.leave(module)
        own = module.state_dict()
        for stem, a, b in self._as_stored(adapter):
            weight = own[f"{stem}.weight"]
            base = self._base.setdefault(f"{stem}.weight", weight.clone())
            weight.copy_(merge(base, a, b))
        self._adapter = {name: tensor.detach().clone() for name, tensor in adapter.items()}

    @torch.no_grad()
    def leave(self, module: nn.Module) -> None:
        """Restore the original weights."""
        own = module.state_dict()
        for name, base in self._base.items():
            own[name].copy_(base)
        self._adapter = {}

    def forget(self) -> None:
        """Drop all state: other weights have been loaded, or the engine is closed."""
        self._base, self._adapter = {}, {}

    def _as_stored(self, adapter: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield `layers_of`, with B A in the orientation of the module's weights: (B A)^T = A^T
        B^T.
        """
        for stem, a, b in layers_of(adapter):
            yield (stem, b.T, a.T) if stem in self._transposed else (stem, a, b)

    @torch.no_grad()
    def apart(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Split a module's state dict into its weights without the adapter, and the adapter; a
        weight that is not bitwise the sum of base and adapter is left out.
        """
        out = {**weights, **self._adapter}
        for stem, a, b in self._as_stored(self._adapter):
            name = f"{stem}.weight"
            sums = torch.equal(merge(self._base[name], a, b), weights[name])
            del out[name]
            if sums:
                out[name] = self._base[name]
        return out


def adapter_over(share_with: nn.Module | None) -> Merged | Added:
    """Return how an engine applies adapters: if it shares the tensors of a module to which peft has
    added one, by additions, which leave these as they are.
    """
    names = () if share_with is None else (name for name, _ in share_with.named_parameters())
    return Added() if any(map(is_of_adapter, names)) else Merged()

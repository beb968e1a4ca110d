"""Routing: the experts that the routers of a mixture choose for each token, recorded by the engine
and replayed by the trainer (router replay, R3, arXiv:2510.11370).

A pass through the model has a carrier: the rows of an engine's pass, or a trainer's micro-batch. It
gets the experts that a router would choose, and returns those to use. Their weights are computed by
the router itself, from its live scores, so that a gradient reaches it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trireme.engines.torch.composite import text_model

_TOPK = (torch.topk, Tensor.topk)
_ENDING = "topkrouter"
"""The ending of the names of transformers' routers, in lower case."""


class RoutingCarrier(Protocol):
    """The tokens of one pass through a model."""

    def route(self, layer: int, chosen: Tensor) -> Tensor:
        """Return the experts [N, K] that compute each token in a layer with experts, for those that
        its router would choose. Layers are counted from 0, without those that have no experts.
        """
        ...


@dataclass(frozen=True)
class RoutingShape:
    """The sizes of a model's routing."""

    layers: int
    """Layers with experts."""
    experts: int
    """Experts of each."""
    chosen: int
    """Experts that compute a token."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the smallest dtype of a record, whose largest value is no expert's number."""
        return torch.uint8 if self.experts <= torch.iinfo(torch.uint8).max else torch.int16


def carry_routing(model: PreTrainedModel) -> RoutingShape:
    """Make the routers of a model choose by the carrier of each pass: `rows` or `packed`.

    Raises ValueError for a model without routers, or with routers that are not known here.
    """
    blocks: dict[nn.Module, nn.Module] = {}  # the innermost one of each router
    for block in text_model(model).modules():
        if isinstance(block, GradientCheckpointingLayer):
            blocks |= {part: block for part in block.modules() if _is_router(part)}
    shapes = {(router.num_experts, router.top_k) for router in blocks}
    if len(shapes) != 1:
        kinds = "no router that is known" if not shapes else "routers that differ between layers"
        raise ValueError(
            f"model_type '{model.config.model_type}' has {kinds}: router replay needs a mixture of "
            "experts whose routers are transformers' TopKRouter classes"
        )
    for layer, (router, block) in enumerate(blocks.items()):
        router.__class__ = _routing(type(router))
        router.routed_layer = layer  # pyright: ignore[reportArgumentType]
        if not isinstance(block, _RoutedBlock):
            block.__class__ = _routed_block(type(block))
        block.routers = (*getattr(block, "routers", ()), router)  # pyright: ignore
    [(experts, chosen)] = shapes
    return RoutingShape(len(blocks), int(experts), int(chosen))  # pyright: ignore


def routing_of(model: nn.Module) -> RoutingShape | None:
    """Return the sizes of a model's routing after `carry_routing`; None without that."""
    routers = [module for module in model.modules() if isinstance(module, _Routing)]
    if not routers:
        return None
    return RoutingShape(len(routers), int(routers[0].num_experts), int(routers[0].top_k))


def is_routing(module: nn.Module) -> bool:
    """Return whether a module is a router of `carry_routing`."""
    return isinstance(module, _Routing)


def has_routing(module: nn.Module) -> bool:
    """Return whether a module contains a router of `carry_routing`."""
    return any(map(is_routing, module.modules()))


def _is_router(module: nn.Module) -> bool:
    """Return whether a module is a router of transformers' that chooses by `topk`."""
    kind = type(module)
    named = kind.__name__.lower().endswith(_ENDING)
    return named and "topk" in inspect.unwrap(kind.forward).__code__.co_names


@cache
def _routing(kind: type[nn.Module]) -> type[nn.Module]:
    """Make the subclass of a router's class that chooses by carriers."""
    return type(kind.__name__, (_Routing, kind), {"__module__": kind.__module__})


@cache
def _routed_block(kind: type[nn.Module]) -> type[nn.Module]:
    """Make the subclass of a block's class that gives its routers the carrier."""
    return type(kind.__name__, (_RoutedBlock, kind), {"__module__": kind.__module__})


class _Routing(nn.Module):
    """A router that chooses by the carrier that its block has set."""

    routed_layer: int
    carrier: RoutingCarrier | None = None
    num_experts: int
    top_k: int

    def forward(self, *args: Any, **options: Any) -> Any:
        """Return the router's own result, for the experts of the carrier."""
        plain = super().forward
        if self.carrier is None:
            return plain(*args, **options)
        with _Choice(self, self.carrier):
            return plain(*args, **options)


class _RoutedBlock(nn.Module):
    """A block that has routers. Recomputing its activations calls it with the same carrier."""

    routers: tuple[_Routing, ...]

    def forward(
        self,
        *args: Any,
        rows: RoutingCarrier | None = None,
        packed: RoutingCarrier | None = None,
        **options: Any,
    ) -> Any:
        """Compute the block's output for the tokens of the carrier."""
        both = {"rows": rows, "packed": packed}
        given = {name: carrier for name, carrier in both.items() if carrier is not None}
        for router in self.routers:
            router.carrier = rows if packed is None else packed
        try:
            return super().forward(*args, **given, **options)
        finally:
            for router in self.routers:
                router.carrier = None


class _Choice(TorchFunctionMode):
    """Replaces the result of a router's choice among all of its experts."""

    def __init__(self, router: _Routing, carrier: RoutingCarrier) -> None:
        super().__init__()
        self._router, self._carrier = router, carrier

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return out
        scores = args[0] if args else (kwargs or {})["input"]
        router = self._router
        # a choice among groups of experts has other sizes
        if scores.ndim != 2 or (scores.shape[1], out[1].shape[1]) != (
            router.num_experts,
            router.top_k,
        ):
            return out
        chosen = self._carrier.route(router.routed_layer, out[1])
        return out if chosen is out[1] else (scores.gather(1, chosen), chosen)

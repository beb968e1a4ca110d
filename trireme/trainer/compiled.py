"""Compiled: compiles a model's blocks by torch, attention being one operator to the compiler.

One graph serves all blocks of a kind and any number of flat tokens. Attention is opaque: the number
and sizes of a layout's rows differ in every micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from trireme.engines.torch.recurrent import has_mixers
from trireme.engines.torch.routing import has_routing

_LARGEST_NUMBER_OF_GRAPHS = 64
"""The limit for one kind of block: with and without gradients, an adapter switched off, each
window.
"""


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each of a model's blocks at its first call. Blocks with a layer that has a state are
    left as they are: how often it is called depends on the micro-batch; and so are blocks whose
    routers replay, since they choose outside of any graph.
    """
    from torch._inductor import config as inductor_config  # slow to import

    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _LARGEST_NUMBER_OF_GRAPHS)
    # what torch 2.13 writes for bfloat16 in vectors of 512 bits ends the process (SIGABRT)
    inductor_config.cpp.simdlen = inductor_config.cpp.simdlen or 256
    for block in blocks:
        if has_mixers(block) or has_routing(block):
            continue
        block.forward = _compiled(block)


def _compiled(block: nn.Module) -> Callable[..., Any]:
    """Return a block's compiled forward, with transformers' wrapper for recomputing activations
    outside of it: inside, the compiler would store most of them.
    """
    plain = type(block).forward
    # older releases of transformers 5 wrap the call
    checkpoints = isinstance(block, GradientCheckpointingLayer) and hasattr(plain, "__wrapped__")
    checkpoints = checkpoints and "__call__" not in vars(GradientCheckpointingLayer)
    plain = plain.__wrapped__ if checkpoints else plain
    inner = torch.compile(MethodType(plain, block), fullgraph=True, dynamic=True)

    def forward(*args: Any, **options: Any) -> Any:
        if checkpoints and block.gradient_checkpointing and block.training:
            again: Any = block._gradient_checkpointing_func
            return again(partial(inner, **options), *args)
        return inner(*args, **options)

    return forward


class _Held(np.ndarray):
    thing: Any


_numbers = itertools.count(1)
_held: WeakValueDictionary[int, _Held] = WeakValueDictionary()


def handle_of(thing: Any) -> Tensor:
    """Return a number [1] by which operators find an object, as long as its memory is in use."""
    memory = np.array([next(_numbers)]).view(_Held)
    memory.thing = thing
    _held[int(memory[0])] = memory
    return torch.from_numpy(memory)


def attend(
    layout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention of a layout (of trainer/attention.py), given by its handle, within a
    compiled block.
    """
    keep = torch.is_grad_enabled() and query.requires_grad
    sinks = query.new_empty(0) if sinks is None else sinks.to(query.dtype)
    return _attend(query, key, value, sinks, layout, window, scale, keep)[0]


def _thing(handle: Tensor) -> Any:
    return _held[int(handle)].thing


@contextmanager
def _recorded() -> Iterator[None]:
    """Enable autograd as outside of an operator, where torch switches it off."""
    native: Any = torch._C
    keys = native.DispatchKeySet(native.DispatchKey.ADInplaceOrView)
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradCPU", "AutogradCUDA"):
        keys = keys | native.DispatchKeySet(getattr(native.DispatchKey, name))
    left_out = native._dispatch_tls_local_exclude_set() - keys
    included = native._dispatch_tls_local_include_set()
    with torch.enable_grad(), native._ForceDispatchKeyGuard(included, left_out):
        yield


@torch.library.custom_op("trireme::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    layout: Tensor,
    window: int,
    scale: float | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Compute attention [1, T, H, D], and with `keep` a handle of the state for its backward pass:
    the state is released with the handle, after that pass or by gradient checkpointing.

    `sinks` [H] or [0], for none.
    """

    def computed(*rows: Tensor) -> Tensor:
        last = rows[3] if len(sinks) else None
        return _thing(layout).attend(*rows[:3], window=window, scale=scale, sinks=last)

    inputs = [query, key, value, sinks][: 4 if len(sinks) else 3]
    if not keep:
        return computed(*inputs).contiguous(), handle_of(None)
    with _recorded():
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = computed(*inputs)
    return out.detach().contiguous(), handle_of((inputs, out))


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    layout: Tensor,
    window: int,
    scale: float | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    return out, layout.new_empty(1)


@torch.library.custom_op("trireme::attend_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor, kept: Tensor, key_heads: int, width: int, sinks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, out = _thing(kept)
    with _recorded():
        query, key, value, *rest = torch.autograd.grad(out, inputs, gradient)
    last = rest[0] if rest else gradient.new_empty(0)
    return query.contiguous(), key.contiguous(), value.contiguous(), last.contiguous()


@_attend_backward.register_fake
def _(
    gradient: Tensor, kept: Tensor, key_heads: int, width: int, sinks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, tokens, heads, value_width = gradient.shape
    query = gradient.new_empty(1, heads, tokens, width)
    key = gradient.new_empty(1, key_heads, tokens, width)
    value = gradient.new_empty(1, key_heads, tokens, value_width)
    return query, key, value, gradient.new_empty(sinks)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.sizes = inputs[1].shape[1], inputs[1].shape[3], inputs[3].shape[0]


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    (kept,) = ctx.saved_tensors
    return *_attend_backward(gradient, kept, *ctx.sizes), None, None, None, None


_attend.register_autograd(_backward, setup_context=_keep)

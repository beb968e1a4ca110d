"""Recurrent: layers whose memory of earlier tokens is a state in place of keys and values.

Linear attention, state-space layers and short convolutions of transformers read their state from a
cache and write it there in place, which carries no gradient and knows one length for all of its
rows. Here such a layer, a *mixer*, is called by a *carrier*: the rows of an engine's pass, or the
nodes of a trainer's micro-batch. A carrier calls it once for each set of sequences that end
together, with the state that each begins with, and takes the state at their end. Arithmetic is the
module's own.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from importlib import metadata
from types import FunctionType
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel

from trireme.config.lookup import WITH_STATE, has_states, unknown_layers

# it recommends kernels that only a GPU has; whether there is one is not asked at an import: the
# driver's answer leaves processes that are forked later without CUDA
logging.getLogger("transformers.integrations.hub_kernels").addFilter(
    lambda _: torch.cuda.is_initialized()
)

State = dict[str, Tensor]
"""What a mixer remembers of N sequences, by name: each [N, ...]."""
Call = Callable[[Tensor, State | None], tuple[Tensor, State]]
"""A mixer: hidden states [N, S, W] and the state that they begin with (None: the first tokens) ->
the output [N, S, W], and the state after S tokens."""


class Carrier(Protocol):
    """Sequences that are computed together, with their states."""

    def carry(self, call: Call, layer: int, hidden: Tensor) -> Tensor:
        """Return a mixer's output for `hidden`, in the form that the model computes."""
        ...


class HasCarrier(Protocol):
    """A packed micro-batch."""

    @property
    def nodes(self) -> Carrier | None:
        """Its nodes; None if it was packed for a model without mixers."""
        ...


class States:
    """The cache that a mixer sees in one call: a state to begin with, and one to end with."""

    def __init__(self, begin: State | None) -> None:
        # copies: a mixer that works in place overwrites them
        self.end: State = {name: state.clone() for name, state in (begin or {}).items()}

    def gradients(self) -> AbstractContextManager[Any]:
        """Let autograd save copies of the given states, which a single token overwrites."""
        given = {state.untyped_storage().data_ptr() for state in self.end.values()}

        def save(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.untyped_storage().data_ptr() in given else tensor

        return saved_tensors_hooks(save, lambda tensor: tensor)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution [N, C, K]."""
        return self.end.get(f"conv{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a recurrence [N, ...]."""
        return self.end.get(f"recurrent{state_idx}")

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state of MiniMax's lightning attention [N, H, D, D]."""
        return self.end.get("linear")

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True: the branch that returns all inputs of a convolution writes nothing in
        place.
        """
        return True

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Put the last inputs before the new ones [N, C, S] -> [N, C, K + S]."""
        before = self.get_conv_state(layer_idx, state_idx)
        inputs = conv_states
        if before is not None:
            inputs = torch.cat([before.to(conv_states.dtype), conv_states], -1)
        size = conv_kernel_size or (inputs if before is None else before).shape[-1]
        padded = F.pad(inputs, (max(0, size - inputs.shape[-1]), 0))
        self.end[f"conv{state_idx}"] = padded[..., -size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Take the state after the new tokens."""
        self.end[f"recurrent{state_idx}"] = recurrent_states
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Take the state after the new tokens."""
        self.end["linear"] = linear_cache


_BY_DEVICE: WeakSet[FunctionType] = WeakSet()
"""The functions that `keep_kernels_on_gpus` has made."""


def keep_kernels_on_gpus(model: nn.Module) -> None:
    """Let the functions of a model's mixers compute by torch on a CPU, and where there are no
    numbers.

    Where flash-linear-attention, causal-conv1d or mamba-ssm can be imported, transformers calls
    their kernels in place of torch's functions, on any device, and they compute on a GPU alone. Its
    wrapper leads back to torch's function (`use_kernel_func_from_hub_with_fallback` of 5.23,
    transformers/integrations/hub_kernels.py).
    """
    for kind in {type(module) for module in model.modules()}:
        if not _is_mixer(kind):
            continue
        names = vars(sys.modules[kind.__module__])
        for name, function in [*names.items()]:
            wrapper = isinstance(function, FunctionType) and hasattr(function, "__wrapped__")
            if wrapper and function not in _BY_DEVICE:
                names[name] = _by_device(function)


def _by_device(kernel: FunctionType) -> FunctionType:
    """Return `kernel` for tensors of a GPU, and what it wraps for others."""
    plain: Any = inspect.unwrap(kernel)
    known = inspect.signature(plain).parameters

    @wraps(kernel)
    def choose(*args: Any, **options: Any) -> Any:
        given = (*args, *options.values())
        if any(isinstance(one, Tensor) and one.is_cuda for one in given):
            return kernel(*args, **options)
        return plain(*args, **{name: one for name, one in options.items() if name in known})

    assert isinstance(choose, FunctionType)
    _BY_DEVICE.add(choose)
    return choose


def carry_states(model: PreTrainedModel) -> None:
    """Make the mixers of a model, which has attention of ours, take the carrier of each pass.

    Raises ValueError if one of its layers has a state that is not known here.
    """
    refuse_unknown(model.config)
    keep_kernels_on_gpus(model)
    for module in model.modules():
        if _is_mixer(type(module)):
            module.__class__ = _carried(type(module))
    if is_recurrent(model.config) and not has_mixers(model):
        raise ValueError(
            f"model_type '{model.config.model_type}' has layers with a state, and none of "
            f"{type(model).__name__}'s modules reads one from transformers' cache: not supported"
        )


def has_mixers(module: nn.Module) -> bool:
    """Return whether a module contains a mixer of `carry_states`."""
    return any(isinstance(part, _Carried) for part in module.modules())


@torch.no_grad()
def count_states(model: PreTrainedModel) -> tuple[int, int]:
    """Return the numbers in the states of one sequence, all layers together: of recurrences, and of
    convolutions. Nothing is computed.
    """
    recurrent = convolved = 0
    for module in model.modules():
        if not isinstance(module, _Carried):
            continue
        tensors = dict((*module.named_parameters(), *module.named_buffers()))
        # of their whole shapes, on a rank too
        tensors = {
            n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()
        }
        width = model.config.get_text_config().hidden_size
        dtype = next(module.parameters()).dtype
        token = torch.empty(1, 1, width, dtype=dtype, device="meta")
        unused = {"position_embeddings", "attention_mask"} & _parameters(type(module))
        one = _OneToken()
        functional_call(module, tensors, (token,), {"rows": one} | dict.fromkeys(unused))
        for name, state in one.end.items():
            if name.startswith("conv"):
                convolved += state.numel()
            else:
                recurrent += state.numel()
    return recurrent, convolved


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Return whether layers of the language model have a state other than keys and values."""
    text = config.get_text_config()
    return has_states(lambda key: getattr(text, key, None))


def refuse_unknown(config: PreTrainedConfig) -> None:
    """Raise ValueError if layers of the language model are of a kind that is not known here, or not
    with this version of transformers.
    """
    installed = metadata.version("transformers")
    if is_recurrent(config) and [int(part) for part in installed.split(".")[:2]] < _LOWEST:
        raise ValueError(
            f"model_type '{config.model_type}' has layers with a state, which need transformers "
            f"{'.'.join(map(str, _LOWEST))} or later: {installed} is installed"
        )
    text = config.get_text_config()
    if others := unknown_layers(lambda key: getattr(text, key, None)):
        raise ValueError(
            f"model_type '{config.model_type}' has layers that are neither attention nor one of "
            f"{', '.join(sorted(WITH_STATE))} ({', '.join(others)}): not supported"
        )


@cache
def _is_mixer(kind: type[nn.Module]) -> bool:
    """Return whether a class of transformers reads its state from a cache."""
    if not kind.__module__.startswith("transformers.models.") or issubclass(kind, _Carried):
        return False
    names = inspect.unwrap(kind.forward).__code__.co_names
    return not {"update_conv_state", "update_recurrent_state", "get_linear_cache"}.isdisjoint(names)


@cache
def _carried(kind: type[nn.Module]) -> type[nn.Module]:
    """Make the subclass of a mixer's class that takes carriers."""
    return type(kind.__name__, (_Carried, kind), {"__module__": kind.__module__})


class _Carried(nn.Module):
    """A mixer that takes the carrier of each pass: `rows` or `packed`."""

    layer_idx: int

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        rows: Carrier | None = None,
        packed: HasCarrier | None = None,
        **options: Any,
    ) -> Any:
        """Compute the mixer's output for the tokens of the carrier."""
        carrier = rows if packed is None else packed.nodes
        if carrier is None:
            raise ValueError(
                f"{type(self).__name__} has a state, and was called without one: not supported"
            )
        plain = super().forward
        more: list[Any] = []

        def call(hidden: Tensor, begin: State | None) -> tuple[Tensor, State]:
            states = States(begin)
            known = options | _cache_options(type(self), states)
            saving = hidden.shape[1] == 1 and torch.is_grad_enabled()
            with states.gradients() if saving else nullcontext(), _mixing(type(self), hidden):
                out = plain(hidden, *args, **known)
            if isinstance(out, tuple):
                out, *more[:] = out
            return out, states.end

        out = carrier.carry(call, self.layer_idx, hidden_states)
        return (out, *more) if more else out


def _mixing(kind: type[nn.Module], hidden: Tensor) -> AbstractContextManager[Any]:
    """Return the context of a mixer's call: lightning attention multiplies factors of its decay,
    which are float32, by what its weights make, and needs autocast where these are in 16 bits.
    """
    device, dtype = hidden.device.type, hidden.dtype
    if dtype not in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, dtype) if _is_lightning(kind) else nullcontext()


@cache
def _is_lightning(kind: type[nn.Module]) -> bool:
    plain = next(k for k in kind.__mro__ if not issubclass(k, _Carried))
    return "get_linear_cache" in inspect.unwrap(plain.forward).__code__.co_names


class _OneToken:
    """A carrier of one sequence, which keeps the state at its end."""

    end: State

    def carry(self, call: Call, layer: int, hidden: Tensor) -> Tensor:
        """Call the mixer from the beginning."""
        out, self.end = call(hidden, None)
        return out


_LOWEST = [5, 22]
"""The first transformers whose mixers take any cache with the methods of `States`."""
_CACHES = "cache", "cache_params", "past_key_values"
"""Names of a mixer's cache: transformers 5.24's, and those that 5.22 and 5.23 have."""


def _cache_options(kind: type[nn.Module], states: States) -> dict[str, Any]:
    """Return the keywords by which a mixer takes a cache and no mask."""
    known = _parameters(kind)
    name = next(name for name in _CACHES if name in known)
    return {name: states} | ({"attention_mask": None} if "attention_mask" in known else {})


@cache
def _parameters(kind: type[nn.Module]) -> frozenset[str]:
    plain = next(k for k in kind.__mro__ if not issubclass(k, _Carried))
    return frozenset(inspect.signature(plain.forward).parameters)

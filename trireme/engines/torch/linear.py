"""Linear: float32 products on a CPU by oneDNN where it is quicker than torch's choice, MKL.

torch multiplies float32 matrices with MKL, which does not use the AVX-512 of AMD's processors;
oneDNN, which torch contains as well, does, and takes half of the time there. On other processors,
and for small matrices, products are torch's own. Both sum in float32, in different orders: results
differ in the last bits, so that byte-equal runs need processors of one maker, with AVX-512 or
without. TRIREME_NATIVE=0 turns it off.

Products of few rows are bound by reading the weights. `pack` copies a matrix into the order in
which oneDNN reads it: such a product then takes 0.5 to 0.9 of the time, on processors with AVX2
alone, and on Intel's, as well.

Processors with AVX2 alone have no instructions for bfloat16, and torch's products of many rows take
up to eight times as long there as those of float32: the factors are widened, and the sums rounded.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cpu import get_cpu_capability

GRID = 16
"""oneDNN prepares itself for each new shape (0.3 ms) and caches 1,024 of them: callers with ever
new numbers of rows, such as a decode step, round them up to a multiple of this."""
_AMD, _INTEL = "AuthenticAMD", "GenuineIntel"
"""Makers of processors, as Linux names them."""
_LEAST_PRODUCT, _LEAST_WEIGHTS = 1 << 20, 1 << 14
"""Multiplications, and weights, below which a call costs more than it saves."""
_LEAST_ROWS, _MOST_WIDENED = 16, 1 << 23
"""Rows from which widening a matrix of bfloat16 costs less than it saves, and numbers that are
widened at once."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [..., K] by weight [N, K], plus bias [N]: [..., N], with gradients if required."""
    if not _suits(x, weight):
        if _is_half(x, weight) and widens():
            return _widened(x, weight, bias)
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias)
    return multiply(x, weight, bias)


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [T, N], b [T, K] -> a' b [N, K], without gradients.

    oneDNN copies a transposed first factor: so it is the smaller one, unless the other is a slice,
    which oneDNN cannot use as second factor (`_is_whole`).
    """
    if a.shape[1] > b.shape[1] and _is_whole(a):
        return linear(b.t(), a.t()).t()
    return linear(a.t(), b.t())


def packs(dtype: torch.dtype) -> bool:
    """Return whether products of few rows by matrices of this dtype gain by a packed copy on this
    processor.
    """
    if dtype is torch.bfloat16:
        return _has_onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float32 and _is_wide()


def widens() -> bool:
    """Return whether products of bfloat16 are quicker in float32: with AVX2 alone."""
    return _is_wide() and not packs(torch.bfloat16)


def pack(weight: Tensor) -> Tensor | None:
    """Copy a weight [N, K] for `multiply`; None if nothing is gained. The copy takes as much
    memory, and some 0.4 s for each GB.
    """
    least = weight.numel() >= _LEAST_WEIGHTS and weight.is_contiguous()
    if not least or weight.device.type != "cpu" or not packs(weight.dtype):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), GRID)


def quicken(model: nn.Module) -> None:
    """Make the linear layers of a model use `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = QuickLinear


class QuickLinear(nn.Linear):
    """nn.Linear that uses `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by `linear`."""
        return linear(input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    """y = x W' + b; dx = dy W, dW = dy' x, db = the sum of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return multiply(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dy_rows = dy.reshape(-1, dy.shape[-1])
        dx = multiply(dy, weight.t(), None) if wanted[0] else None
        dw = transposed_product(dy_rows, x.reshape(-1, x.shape[-1])) if wanted[1] else None
        return dx, dw, dy_rows.sum(0) if wanted[2] else None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., K] by weight [N, K], packed or not, plus bias [N]: [..., N]. By oneDNN,
    without gradients.
    """
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply bfloat16 x [..., K] by weight [N, K], plus bias [N]: [..., N], summed in float32 and
    rounded once, without gradients.
    """
    wide, out = x.float(), x.new_empty(*x.shape[:-1], len(weight))
    some = max(1, _MOST_WIDENED // weight.shape[1])
    for first in range(0, len(weight), some):
        part = slice(first, first + some)
        added = None if bias is None else bias[part].float()
        out[..., part] = F.linear(wide, weight[part].float(), added)
    return out


def _is_half(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product is of bfloat16 on a CPU, and of many rows, without gradients."""
    return (
        not torch.compiler.is_compiling()
        and x.dtype is torch.bfloat16
        and weight.dtype is torch.bfloat16
        and x.numel() >= _LEAST_ROWS * x.shape[-1]
        and x.numel() * weight.shape[0] >= _LEAST_PRODUCT
        and x.device.type == weight.device.type == "cpu"
        and type(x) in (Tensor, nn.Parameter)
        and type(weight) in (Tensor, nn.Parameter)
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.is_autocast_enabled("cpu")
    )


def _is_whole(weight: Tensor) -> bool:
    """Return whether a matrix, or its transpose, is contiguous: oneDNN multiplies by one with gaps,
    such as a slice of columns, some 500 times as slowly.
    """
    return weight.is_contiguous() or weight.t().is_contiguous()


def _suits(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # a compiler chooses by itself, and cannot compile this
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and weight.numel() >= _LEAST_WEIGHTS
        and x.numel() * weight.shape[0] >= _LEAST_PRODUCT
        and x.device.type == weight.device.type == "cpu"
        and type(x) in (Tensor, nn.Parameter)
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and _is_whole(weight)
        and is_quicker()
    )


@cache
def is_quicker() -> bool:
    """Return whether oneDNN multiplies many rows in less time than MKL does: on AMD's processors
    that have AVX-512, which MKL does not use there. On those with AVX2 alone MKL takes 0.65 to
    0.8 of oneDNN's time for a layer's three products in training.
    """
    return _is_wide() and {_AMD, "avx512f"} <= _processor()


@cache
def _is_wide() -> bool:
    """Return whether this processor is AMD's or Intel's, with AVX2 at least that torch may use (the
    variable ATEN_CPU_CAPABILITY forbids it), and torch has oneDNN's operator.
    """
    wide = get_cpu_capability() in ("AVX2", "AVX512")
    return _has_onednn() and wide and not _processor().isdisjoint((_AMD, _INTEL))


@cache
def _processor() -> frozenset[str]:
    """Return the words by which Linux describes the processor: its maker, and what it has."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


def _has_onednn() -> bool:
    """Return whether torch has oneDNN's operator, and the environment allows its use."""
    if os.environ.get("TRIREME_NATIVE") == "0" or not hasattr(torch.ops, "mkldnn"):
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")

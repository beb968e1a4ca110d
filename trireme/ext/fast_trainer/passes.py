"""Passes: a small Llama-like model's forward and backward pass over a micro-batch, compiled.

A train step of a small model by torch's operators spends most of its time between matrix products:
on norms, rotations and gates, on gathering the rows of attention, on calls. passes.c does all that
lies between embeddings and last hidden states in one call each way, without the interpreter's lock,
with matrix products of its own. It attends over the trie of tokens as it is, without padding. The
number of threads changes no bit of the result, but it differs from torch's in the last ones.

Larger models, adapters, shards, other dtypes than float32, pictures, and blocks that somebody
compiles, recomputes or watches are computed by transformers' module, as everything is without a C
compiler or with TRIREME_NATIVE=0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trireme.batch import of_tokens
from trireme.engines.torch.composite import text_model
from trireme.engines.torch.linear import QuickLinear
from trireme.engines.torch.specimen import make_specimen
from trireme.ext.fast_engine.lean import unlike
from trireme.ext.fast_trainer.call import Call, Compiled, Layer
from trireme.log import get_logger
from trireme.trainer.attention import NAME, Rows
from trireme.trainer.pack import PackedBatch, pack
from trireme.trainer.passes import TrainingPass

logger = get_logger("trainer")

MOST_WEIGHTS = 1 << 24
"""Numbers in a model's blocks, which are copied twice for a micro-batch; above it torch's products
take most of a step."""
RECOMPUTES = "trainer.enable_gradient_checkpointing, or too little memory without it"
_AGREEMENT = 1e-4
"""Largest difference of hidden states and gradients from transformers' module, of the largest
number of each."""
_PROOF = ([7, 2, 3, 5, 1, 4, 6, 2, 3], [7, 2, 3, 5, 6, 3, 3, 4, 1], [7, 2, 4, 4, 5], [1, 6, 2, 2])


class CompiledPass:
    """Passes of models with one architecture."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._logged: set[bool] = set()

    def __call__(self, base: Any, packed: PackedBatch) -> Tensor | None:
        """Return what `compute` does; the log names the passes that are used."""
        hidden = self.compute(base, packed)
        if (ours := hidden is not None) not in self._logged:
            self._logged.add(ours)
            whose = "compiled" if ours else "transformers' own"
            why = "" if ours or not _recomputes(base) else f": blocks are recomputed ({RECOMPUTES})"
            logger.info("micro-batches are computed by %s passes%s", whose, why)
        return hidden

    def compute(self, base: Any, packed: PackedBatch) -> Tensor | None:
        """Compute a micro-batch by the weights of a language model, if both are plain."""
        layout = packed.attention
        if not isinstance(layout, Rows) or not _is_text(packed, layout):
            return None
        layers = [Layer.of(block) for block in base.layers]
        if not _is_plain(base, layers):
            return None
        x = base.embed_tokens(packed.tokens)
        half = self._compiled.head_width // 2
        angles = (table[0, :, :half] for table in base.rotary_emb(x, packed.positions[None]))
        cosines, sines = (table.contiguous() for table in angles)
        call = Call(self._compiled, layers, base.norm.weight, layout.trie, cosines, sines)
        if torch.is_grad_enabled() and any(one.requires_grad for one in (x, *call.parameters)):
            return _Hidden.apply(x, call, *call.parameters)
        return call.forward(x.detach(), keep=False)


class _Hidden(torch.autograd.Function):
    """The last hidden states as a function of embeddings and weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *parameters: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, *parameters)  # torch then refuses weights that have changed
        return call.forward(x, keep=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        call, ctx.call = ctx.call, None
        by_x, made = call.backward(gradients[0].clone(memory_format=torch.contiguous_format))
        wanted = ctx.needs_input_grad
        each = (one if needed else None for one, needed in zip(made, wanted[2:], strict=True))
        return by_x if wanted[0] else None, None, *each


def make_pass(model: PreTrainedModel) -> TrainingPass | None:
    """Make the compiled pass of a model, verified on a specimen; None if there is none, and log
    why.
    """
    reason = _unsuited(model)
    if reason is None:
        try:
            compiled = CompiledPass(Compiled.of(text_model(model)))
        except OSError as error:
            reason = str(error)
        else:
            worst = _difference(model, compiled)
            if worst < _AGREEMENT:
                return compiled
            reason = f"they differ by {worst:.3g} of the largest number"
    logger.info("micro-batches are computed by transformers' own passes: %s", reason)
    return None


def _unsuited(model: PreTrainedModel) -> str | None:
    """Return why a model has no such pass; None if it may have one."""
    if reason := unlike(model):
        return reason
    base: Any = text_model(model)
    if base.norm.weight.dtype != torch.float32:
        return f"its weights are {base.norm.weight.dtype}"
    weights = sum(one.numel() for one in base.layers.parameters())
    if weights > MOST_WEIGHTS:
        return f"its blocks have {weights:,} weights"
    for product in Layer.of(base.layers[0]).products:
        if len({part.bias is None for part in product.parts}) > 1:
            return "only some of its projections have a bias"
    return None


def _is_text(packed: PackedBatch, layout: Rows) -> bool:
    """Return whether a micro-batch is tokens and nothing else."""
    more = layout.trie.around, packed.rotary, packed.routed_experts, packed.nodes
    return not packed.pictures and all(one is None for one in more)


def _is_plain(base: Any, layers: Sequence[Layer]) -> bool:
    """Return whether a language model's modules are as they were loaded, and nobody watches them or
    torch's operators.
    """
    if torch.is_autocast_enabled("cpu") or _is_watched():
        return False
    if _recomputes(base):
        return False
    projections = (part for layer in layers for product in layer.products for part in product.parts)
    if any(type(part) not in (nn.Linear, QuickLinear) for part in projections):
        return False
    return all(module is base or _is_own(module) for module in base.modules()) and all(
        type(one) is nn.Parameter
        and one.dtype is torch.float32
        and one.device.type == "cpu"
        and one.is_contiguous()
        for one in base.parameters()
    )


def _recomputes(base: Any) -> bool:
    """Return whether a block's activations are computed again in the backward pass."""
    return any(block.gradient_checkpointing and block.training for block in base.layers)


def _is_watched() -> bool:
    """Return whether somebody traces torch's operators, or changes what they do."""
    native: Any = torch._C
    return torch.compiler.is_compiling() or native._len_torch_dispatch_stack() > 0


def _is_own(module: nn.Module) -> bool:
    """Return whether a module has its class's forward and no hook."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    return "forward" not in vars(module) and not any(hooks)


@torch.enable_grad()
def _difference(model: PreTrainedModel, compiled: CompiledPass) -> float:
    """Return the largest difference of a specimen's hidden states and gradients by the two passes,
    relative to the largest number of each.
    """
    specimen = make_specimen(model.config, attention=NAME).requires_grad_()
    table: Any = specimen.get_input_embeddings()
    packed = pack(of_tokens([[token % len(table.weight) for token in row] for row in _PROOF]))
    base: Any = text_model(specimen)
    own = base(**packed.inputs(specimen), use_cache=False, packed=packed).last_hidden_state[0]
    ours = compiled.compute(base, packed)
    if ours is None:
        return float("inf")
    weights = list(base.parameters())
    slope = torch.linspace(-1, 1, own.numel(), dtype=torch.float32).view_as(own)
    pairs = [(own, ours)]
    pairs += zip(*(torch.autograd.grad(x, weights, slope) for x in (own, ours)), strict=True)
    gaps = [(a - b).detach().abs().max() / a.detach().abs().max() for a, b in pairs]
    return float(torch.stack(gaps).max())

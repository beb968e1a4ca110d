"""Step: decode steps of a small float32 model as one compiled call.

A step of a small model by torch's operators spends more time on calls than on arithmetic. One call
of `decode_step` in native.c does all of it without the interpreter's lock, some rows per thread,
with its own matrix products: each number has the same bits whatever other rows are in the batch.
`decode_steps` draws the tokens as well, until a row ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trireme.engines.torch.forward import DrawRule
from trireme.engines.torch.rows import RowStore
from trireme.ext.fast_engine.native import Matrix, NativeOps, Panels, Work
from trireme.ext.fast_engine.where import Where

if TYPE_CHECKING:
    from trireme.ext.fast_engine.lean import Layer, Product

MOST_WEIGHTS = 1 << 24
"""Numbers in a model's matrices, which are copied (64 MiB); above it products
whose columns the threads share are as quick."""
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


_NORMS = ("norm", "q_norm", "k_norm", "mlp_norm")
PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")
"""The linear layers of a block."""


class _Block(ctypes.Structure):
    """`Block` of native.c."""

    _fields_ = (
        *((name, _POINTER) for name in _NORMS),
        *((name, Matrix) for name in PRODUCTS),
        *((name, _POINTER) for name in ("keys", "values", "prompt_keys", "prompt_values")),
    )


class _Step(ctypes.Structure):
    """`Step` of native.c."""

    _fields_ = (
        ("work", Work),
        *((name, _POINTER) for name in ("blocks", "norm", "cosines", "sines")),
        *((name, _POINTER) for name in ("positions", "x", "logits")),
        ("head", Matrix),
        ("num_blocks", _INT),
        ("width", _INT),
        ("eps", _FLOAT),
    )


class _Draws(ctypes.Structure):
    """`Draws` of native.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("streams", "places", "left", "least", "temperature")),
        *((name, _POINTER) for name in ("ends", "embeddings", "tokens", "logprobs", "sampler")),
        ("steps", _INT),
    )


class CompiledStep:
    """Decode steps of one model, with packed copies of its matrices."""

    def __init__(
        self,
        ops: NativeOps,
        layers: Sequence[Layer],
        *,
        norm: Tensor,
        head: Product,
        head_width: int,
        eps: float,
        scale: float,
    ) -> None:
        self._ops = ops
        self._layers = layers
        self._norm, self._head = norm, head
        self._matrices = matrices(layers, head)
        self._versions: list[int] = []
        num_heads, num_keys = (len(p[0]) // head_width for p in (layers[0].q, layers[0].k))
        self._like = norm.new_empty(1, num_keys, 1, head_width)
        self._blocks = (_Block * len(layers))()
        self._step = _Step(
            Work(H=num_heads, K=num_keys, D=head_width, scale=scale),
            blocks=ctypes.addressof(self._blocks),
            norm=norm.data_ptr(),
            num_blocks=len(layers),
            width=len(norm),
            eps=eps,
        )

    @staticmethod
    def suits(layers: Sequence[Layer], head: Product) -> bool:
        """Return whether the model is small enough, float32 throughout, and without an adapter
        that is not merged.
        """
        weights = matrices(layers, head)
        if any(getattr(layer, name).addition for layer in layers for name in PRODUCTS):
            return False
        plain = all(weight.dtype == torch.float32 for weight in weights)
        return plain and sum(weight.numel() for weight in weights) <= MOST_WEIGHTS

    def __call__(
        self, x: Tensor, where: Where, store: RowStore, prompts: RowStore, tables: list[Tensor]
    ) -> Tensor:
        """Return logits [B, V] of the tokens whose embeddings are x [B, W], which is
        overwritten.
        """
        logits = self._prepare(x, where, store, prompts, tables)
        self._ops.invoke("decode_step", ctypes.addressof(self._step))
        return logits

    def several(
        self, x: Tensor, where: Where, store: RowStore, prompts: RowStore, tables: list[Tensor],
        rule: DrawRule, embeddings: Tensor, most: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Decode and draw up to `most` tokens of each row, until one of them ends; x as above.

        Returns what `ForwardPass.several` does.
        """
        logits = self._prepare(x, where, store, prompts, tables)
        rows, vocabulary = logits.shape
        tokens = torch.empty(most, rows, dtype=torch.long)
        logprobs = torch.empty(most, rows, dtype=torch.float32)
        sampler = logprobs if rule.least is None else torch.empty_like(logprobs)
        ends = torch.zeros(vocabulary, dtype=torch.uint8)
        ends[[token for token in rule.ends if token < vocabulary]] = 1
        draws = _Draws(
            rule.streams.data_ptr(), rule.places.data_ptr(), rule.left.data_ptr(),
            None if rule.least is None else rule.least.data_ptr(), rule.temperature.data_ptr(),
            ends.data_ptr(), embeddings.data_ptr(), tokens.data_ptr(), logprobs.data_ptr(),
            sampler.data_ptr(), most,
        )  # fmt: skip
        step, drawn = ctypes.addressof(self._step), ctypes.addressof(draws)
        count = self._ops.count("decode_steps", step, drawn)
        return tokens[:count], logprobs[:count], sampler[:count]

    def _prepare(
        self, x: Tensor, where: Where, store: RowStore, prompts: RowStore, tables: list[Tensor]
    ) -> Tensor:
        """Point the step to its tensors; returns the logits that it will write."""
        versions = [weight._version for weight in self._matrices]
        if versions != self._versions:  # changed in place by anyone
            self._copy()
            self._versions = versions
        step, rows = self._step, len(x)
        for number, block in enumerate(self._blocks):
            own, shared = store.layer(number, self._like), prompts.layer(number, self._like)
            block.keys, block.values = (tensor.data_ptr() for tensor in own)
            block.prompt_keys, block.prompt_values = (tensor.data_ptr() for tensor in shared)
            step.work.room, step.work.prompt_room = own[0].shape[2], shared[0].shape[2]
        step.work.lengths, step.work.slots = where.lengths.data_ptr(), where.slots.data_ptr()
        step.work.shared, step.work.B = where.shared.data_ptr(), rows
        step.work.threads = torch.get_num_threads()
        step.cosines, step.sines = (table.data_ptr() for table in tables[:2])
        step.x, step.positions = x.data_ptr(), where.positions.data_ptr()
        logits = self._norm.new_empty(rows, len(self._head[0]))
        step.logits = logits.data_ptr()
        return logits

    def _copy(self) -> None:
        self._copies: list[Panels] = []
        for layer, block in zip(self._layers, self._blocks, strict=True):
            for name in _NORMS:
                weight: Tensor | None = getattr(layer, name)
                setattr(block, name, None if weight is None else weight.data_ptr())
            for name in PRODUCTS:
                setattr(block, name, self._packed(getattr(layer, name)))
        self._step.head = self._packed(self._head)

    def _packed(self, product: Product) -> Matrix:
        self._copies.append(Panels(self._ops, product.weight, product.bias))
        return self._copies[-1].matrix


def matrices(layers: Sequence[Layer], head: Product) -> list[Tensor]:
    """Return the weights of all linear layers, the head's first."""
    return [head[0], *(getattr(layer, name)[0] for layer in layers for name in PRODUCTS)]

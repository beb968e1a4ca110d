"""Call: one micro-batch through passes.c, forward and, later, backward."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trireme.ext.fast_engine.native import Matrix, NativeOps, Panels, load
from trireme.trainer.attention import Trie

_SOURCE = Path(__file__).with_name("passes.c")
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {"forward": [_POINTER], "backward": [_POINTER], "chunk": []}
_NORMS = "norm", "q_norm", "k_norm", "mlp_norm"
_PRODUCTS = "qkv", "o", "gate_up", "down"
_STORED = "x", "qkv_out", "log_sums", "heads", "middle", "both"
"""What a block's forward pass stores."""


class _Block(ctypes.Structure):
    """`Block` of passes.c."""

    _fields_ = (
        *((name, _POINTER) for name in _NORMS),
        *((name, Matrix) for name in _PRODUCTS),
        *((f"{name}_back", Matrix) for name in _PRODUCTS),
        *((name, _POINTER) for name in _STORED),
        *((f"d_{name}", _POINTER) for name in (*_NORMS, *_PRODUCTS)),
        *((f"b_{name}", _POINTER) for name in _PRODUCTS),
    )


class _Pass(ctypes.Structure):
    """`Pass` of passes.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("blocks", "norm", "cosines", "sines")),
        *((name, _POINTER) for name in ("tries", "spans", "starts", "keys")),
        *((name, _POINTER) for name in ("x", "out", "rotated")),
        *((name, _POINTER) for name in ("d_norm", "dx", "dx_next", "d_middle", "d_heads")),
        *((name, _POINTER) for name in ("d_qkv", "d_both", "hidden", "mlp_hidden", "act", "parts")),
        *((name, _INT) for name in ("num_blocks", "T", "R", "longest", "H", "K", "D", "W", "I")),
        ("threads", _INT),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
    )


class Product(NamedTuple):
    """Linear layers with one input, as one product."""

    parts: tuple[nn.Linear, ...]

    @property
    def weight(self) -> Tensor:
        """[out, in] the weights of all parts."""
        weights = [part.weight.detach() for part in self.parts]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    @property
    def bias(self) -> Tensor | None:
        """[out] the biases of all parts, or of none."""
        biases = [part.bias.detach() for part in self.parts if part.bias is not None]
        return torch.cat(biases) if biases else None

    @property
    def parameters(self) -> list[Tensor]:
        """The weights, then the biases."""
        weights = [part.weight for part in self.parts]
        return weights + [part.bias for part in self.parts if part.bias is not None]

    def split(self, weight: Tensor, bias: Tensor | None) -> Iterator[Tensor]:
        """Yield the gradients of `parameters`."""
        heights = [len(part.weight) for part in self.parts]
        yield from weight.split(heights)
        if bias is not None:
            yield from bias.split(heights)


class Layer(NamedTuple):
    """The weights of one block."""

    norms: tuple[Tensor | None, ...]
    """Those of `_NORMS`."""
    products: tuple[Product, ...]
    """Those of `_PRODUCTS`."""

    @classmethod
    def of(cls, block: Any) -> Layer:
        """Take those of a block of transformers."""
        attention, mlp = block.self_attn, block.mlp
        norms = (
            block.input_layernorm,
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
            block.post_attention_layernorm,
        )
        products = (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        )
        weights = (None if norm is None else norm.weight for norm in norms)
        return cls(tuple(weights), tuple(map(Product, products)))

    @property
    def parameters(self) -> list[Tensor]:
        """The norms' weights, then those of the products."""
        norms = [norm for norm in self.norms if norm is not None]
        return norms + [one for product in self.products for one in product.parameters]


@dataclass(frozen=True)
class Compiled:
    """The compiled functions, with what they need to know of an architecture."""

    library: ctypes.CDLL
    ops: NativeOps
    """Makes the packed copies of matrices."""
    head_width: int
    scale: float
    """Of the scores of attention."""
    eps: float
    """Of the norms."""

    @classmethod
    def of(cls, base: Any) -> Compiled:
        """Compile them for a language model of transformers. Raises OSError if that fails."""
        attention, norm = base.layers[0].self_attn, base.norm
        library, ops = load(_SOURCE, _SIGNATURES), NativeOps(torch.float32)
        return cls(library, ops, attention.head_dim, attention.scaling, norm.variance_epsilon)

    def invoke(self, name: str, one: _Pass) -> None:
        """Call `forward` or `backward`, without the interpreter's lock."""
        with torch.profiler.record_function(f"compiled {name} pass"):
            failed = getattr(self.library, name)(ctypes.addressof(one))
        if failed:
            raise MemoryError(f"no memory is left for the trainer's compiled {name} pass")


class Call:
    """One micro-batch of T flat tokens."""

    def __init__(
        self,
        compiled: Compiled,
        layers: Sequence[Layer],
        norm: Tensor,
        trie: Trie,
        cosines: Tensor,
        sines: Tensor,
    ) -> None:
        """`cosines` and `sines` [T, D / 2] of the rotary embedding."""
        self._compiled, self._layers, self._norm = compiled, layers, norm
        self.parameters = [*(one for layer in layers for one in layer.parameters), norm]
        """The weights, block by block, and the last norm's."""
        qkv, o, gate_up, _ = layers[0].products
        self._head, self._queries = compiled.head_width, o.parts[0].in_features
        self._keys = len(qkv.parts[1].weight)
        self._width, self._inner = qkv.parts[0].in_features, len(gate_up.parts[0].weight)
        self._tokens = len(cosines)
        self._alive: list[Any] = [cosines, sines]
        """What the structures point to."""
        self._blocks = (_Block * len(layers))()
        for block, layer in zip(self._blocks, layers, strict=True):
            for name, weight in zip(_NORMS, layer.norms, strict=True):
                setattr(block, name, None if weight is None else weight.data_ptr())
        begins, paths = zip(*trie.spans, strict=True)
        lengths = np.array([len(path) for path in paths])
        first = [path[begin] for begin, path in trie.spans]
        tries = np.append(np.flatnonzero(np.array(begins) == 0), len(paths))
        self._struct = _Pass(
            blocks=ctypes.addressof(self._blocks),
            norm=norm.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            tries=self._index(tries),
            spans=self._index(np.stack([first, lengths - begins, lengths], 1)),
            starts=self._index(np.cumsum(lengths) - lengths),
            keys=self._index(np.concatenate(paths)),
            rotated=self._numbers(self._tokens, self._queries + self._keys),
            num_blocks=len(layers),
            T=self._tokens,
            R=len(tries) - 1,
            longest=int(lengths.max()),
            H=self._queries // self._head,
            K=self._keys // self._head,
            D=self._head,
            W=self._width,
            I=self._inner,
            threads=torch.get_num_threads(),
            eps=compiled.eps,
            scale=compiled.scale,
        )

    def forward(self, x: Tensor, *, keep: bool) -> Tensor:
        """Return the last hidden states [T, W] of embeddings x [T, W]; with `keep` all is stored
        that `backward` needs, without it x is overwritten.
        """
        self._alive.append(x)
        stored = self._store(len(self._layers) if keep else 1)
        for number, (block, layer) in enumerate(zip(self._blocks, self._layers, strict=True)):
            for name, product in zip(_PRODUCTS, layer.products, strict=True):
                weight = product.weight
                setattr(block, name, self._copied(weight, product.bias))
                if keep:
                    setattr(block, f"{name}_back", self._copied(weight.t()))
            for name, tensor in stored.items():
                setattr(block, name, tensor[number if keep else 0].data_ptr())
            if number == 0 or not keep:
                block.x = x.data_ptr()
        self._struct.x = self._numbers(self._tokens, self._width) if keep else x.data_ptr()
        out = torch.empty_like(x)
        self._struct.out = out.data_ptr()
        self._compiled.invoke("forward", self._struct)
        return out

    def backward(self, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients by the embeddings and by `parameters`, from that by the result,
        which is overwritten.
        """
        one, tokens, width = self._struct, self._tokens, self._width
        other = torch.empty_like(gradient)
        one.dx, one.dx_next = gradient.data_ptr(), other.data_ptr()
        one.d_middle, one.hidden, one.mlp_hidden = (self._numbers(tokens, width) for _ in range(3))
        one.d_heads = self._numbers(tokens, self._queries)
        one.d_qkv = self._numbers(tokens, self._queries + 2 * self._keys)
        one.d_both = self._numbers(tokens, 2 * self._inner)
        one.act = self._numbers(tokens, self._inner)
        chunks = -(-tokens // self._compiled.library.chunk())
        one.parts = self._numbers(chunks, 2 * (width + self._head))
        made: list[Tensor] = []
        for block, layer in zip(self._blocks, self._layers, strict=True):
            for name, weight in zip(_NORMS, layer.norms, strict=True):
                if weight is not None:
                    made.append(torch.empty_like(weight))
                    setattr(block, f"d_{name}", made[-1].data_ptr())
            for name, product in zip(_PRODUCTS, layer.products, strict=True):
                matrix: Matrix = getattr(block, name)
                by_weight = gradient.new_empty(matrix.outputs, matrix.inputs)
                by_bias = gradient.new_empty(matrix.outputs) if matrix.bias else None
                setattr(block, f"d_{name}", by_weight.data_ptr())
                setattr(block, f"b_{name}", None if by_bias is None else by_bias.data_ptr())
                made += product.split(by_weight, by_bias)
        made.append(torch.empty_like(self._norm))
        one.d_norm = made[-1].data_ptr()
        self._compiled.invoke("backward", one)
        return (gradient, other)[len(self._layers) % 2], made

    def _store(self, count: int) -> dict[str, Tensor]:
        """Return memory for what a forward pass stores, [count, T, ...]."""
        widths = {
            "x": self._width,
            "qkv_out": self._queries + 2 * self._keys,
            "log_sums": self._queries // self._head,
            "heads": self._queries,
            "middle": self._width,
            "both": 2 * self._inner,
        }
        stored = {
            name: torch.empty(count, self._tokens, size, dtype=torch.float32)
            for name, size in widths.items()
        }
        self._alive += stored.values()
        return stored

    def _index(self, numbers: np.ndarray) -> int:
        """Return the address of a copy of indices, which lives as long as this call."""
        self._alive.append(np.ascontiguousarray(numbers, np.int64))
        return self._alive[-1].ctypes.data

    def _numbers(self, *size: int) -> int:
        """Return the address of new memory, which lives as long as this call."""
        self._alive.append(torch.empty(size, dtype=torch.float32))
        return self._alive[-1].data_ptr()

    def _copied(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        """Copy a weight for products."""
        panels = Panels(self._compiled.ops, weight, bias)
        self._alive += panels, bias
        return panels.matrix

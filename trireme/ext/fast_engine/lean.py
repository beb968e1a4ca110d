"""Lean: a faster forward pass of our own for Llama-like models, over the module's own tensors.

For other models, or if the two passes disagree on a specimen of the architecture, the decoder calls
transformers' module. The gains are:
- a prompt that several requests share is stored and read once, in `prompts`;
- a decode step attends over each row's own tokens, and its norms, rotations and gates are one call
  each (`native.py`; torch's own operators without a compiler);
- decode steps of a small float32 model are one compiled call (`step.py`), up to eight of them with
  their draws, and one of another model multiplies by packed copies of its matrices;
- a prefill computes no padding, and stops at the last layer's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from trireme.engines.adapter import added
from trireme.engines.sampling import inverse_cdf, log_probabilities
from trireme.engines.torch.forward import DrawRule
from trireme.engines.torch.linear import GRID, linear, packs
from trireme.engines.torch.rows import NAME, Pass, RowStore
from trireme.engines.torch.specimen import make_specimen
from trireme.ext.fast_engine.native import NativeOps, PackedProduct, packed_product
from trireme.ext.fast_engine.step import PRODUCTS, CompiledStep, matrices
from trireme.ext.fast_engine.where import Where
from trireme.log import get_logger

logger = get_logger("engine")

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend only on a token's position."""
_PROOF = ((5, 3, 8, 2, 7, 1, 6), (5, 3, 8, 2, 6, 4, 9, 3), (1, 6, 1, 4, 4, 2, 3, 5, 8))
_SHARED = 4
_AGREEMENT = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference of log-probabilities from transformers' module; multiplied by the largest
logit if that is above 1."""


class Product(NamedTuple):
    """The tensors of one linear layer."""

    weight: Tensor
    bias: Tensor | None
    addition: tuple[Tensor, Tensor] | None
    """A and B of an adapter that is not merged."""
    packed: PackedProduct | None = None

    def pack(self, ops: PlainOps | NativeOps) -> Product:
        """Return the product with a packed copy of its weight, where one is quicker."""
        return self._replace(packed=ops.packed(self.weight, self.bias))

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [..., K]: [..., N]."""
        product = self.packed
        out = linear(x, self.weight, self.bias) if product is None else product(x)
        return out if self.addition is None else added(out, x, *self.addition)


@dataclass
class Layer:
    """The tensors of one block."""

    norm: Tensor
    q: Product
    k: Product
    v: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Product
    mlp_norm: Tensor
    gate: Product
    up: Product
    down: Product

    def pack(self, ops: PlainOps | NativeOps) -> Layer:
        """Return the block with packed copies of its matrices, where these are quicker."""
        return replace(self, **{name: getattr(self, name).pack(ops) for name in PRODUCTS})


class PlainOps:
    """The operations of a step other than matrix products, in torch; `native.py` has them
    compiled.
    """

    name = "torch's operators"

    multiplies = False
    """Products are torch's or oneDNN's."""
    log_probabilities = staticmethod(log_probabilities)
    inverse_cdf = staticmethod(inverse_cdf)
    packed = staticmethod(packed_product)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `x` [N, W] in place and return its RMSNorm in the weight's dtype; x is
        float32.
        """
        if delta is not None:
            x += delta
        return (weight.float() * _normed(x, eps)).to(weight.dtype)

    def rotate(
        self, x: Tensor, weight: Tensor | None, tables: list[Tensor], positions: Tensor, eps: float
    ) -> Tensor:
        """Rotate `x` [N, H, D] by its positions, after RMSNorm if a weight is given."""
        wide = x.float()
        if weight is not None:
            wide = weight.float() * _normed(wide, eps).to(x.dtype)
        cosines, signed_sines = (table[positions][:, None] for table in tables[2:])
        turned = wide.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(wide * cosines, turned, signed_sines).to(x.dtype)

    def silu_times(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return SiLU of the gate times the other half."""
        return F.silu(gate).mul_(up)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, where: Where, scale: float,
        store: RowStore, prompts: RowStore,
    ) -> Tensor:  # fmt: skip
        """Append k and v [B, K, D] to the rows, then attend with q [B, H, D] over all of their
        tokens.

        The prompts that rows share are read once for all of them; one softmax covers both parts.
        """
        keys, values = store.layer(layer, k[:, :, None])
        (batch, num_heads, width), num_keys, room = q.shape, k.shape[1], keys.shape[2]
        at = where.flat(num_keys, room)
        keys.view(-1, width).index_copy_(0, at, k.reshape(-1, width))
        values.view(-1, width).index_copy_(0, at, v.reshape(-1, width))
        count, group = batch * num_keys, num_heads // num_keys
        query = (q * scale).view(count, group, width)
        own_keys = keys.view(-1, room, width)[:count, : where.longest]
        own_values = values.view(-1, room, width)[:count, : where.longest]
        scores = torch.bmm(query, own_keys.transpose(1, 2))
        first = where.longest_shared
        if first:
            first_keys, first_values = prompts.layer(layer, k[:, :, None])
            slots = where.num_slots
            by_slot = where.to_slots(query.view(batch, num_keys, group, width))
            first_keys, first_values = (
                t.view(-1, t.shape[2], width)[: slots * num_keys, :first]
                for t in (first_keys, first_values)
            )
            of_prompt = torch.bmm(by_slot, first_keys.transpose(1, 2))
            of_prompt = where.to_rows(of_prompt, num_keys).view(count, group, first)
            scores = torch.cat([of_prompt, scores], -1)
        bias = where.bias(scores.dtype)
        if bias is not None:
            scores = scores.view(batch, num_heads, -1).add_(bias[:, None])
        p = scores.softmax(-1, dtype=torch.float32).to(q.dtype).view(count, group, -1)
        out = torch.bmm(p[:, :, first:], own_values)
        if first:
            of_prompt = p[:, :, :first].reshape(batch, num_keys, group, first)
            by_slot = torch.bmm(where.to_slots(of_prompt), first_values)
            out += where.to_rows(by_slot, num_keys).view(count, group, width)
        return out.view(batch, num_heads, width)


def _normed(x: Tensor, eps: float) -> Tensor:
    """Return RMSNorm in float32, without its weight."""
    return x * x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


class Lean:
    """Forward passes of one model."""

    def __init__(
        self, model: PreTrainedModel, ops: PlainOps | NativeOps, *, compiled: bool = True
    ) -> None:
        """`compiled` is whether a small model's steps may be one call."""
        self._model = model
        self._ops = ops
        self.inverse_cdf, self.log_probabilities = ops.inverse_cdf, ops.log_probabilities
        base: Any = model.base_model
        self._embed: nn.Module = base.embed_tokens
        attention = base.layers[0].self_attn
        self._width: int = attention.head_dim
        self._scale: float = attention.scaling
        self._eps: float = base.norm.variance_epsilon
        self._may_compile = compiled
        self._by_onednn = packs(torch.float32) and not ops.multiplies
        self._tables: list[Tensor]
        self.renew()

    def renew(self) -> None:
        """Take the module's tensors again: the weights have changed, or may be other tensors."""
        base: Any = self._model.base_model
        head: Any = self._model.get_output_embeddings()
        self._tables = []
        self._layers = [_layer(block) for block in base.layers]
        self._norm = base.norm.weight.detach()
        self._head = _linear(head)
        self._compiled = self._compile()
        self._matrices = matrices(self._layers, self._head)
        self._packed: tuple[list[int], list[Layer], Product] | None = None

    def rest(self) -> None:
        """Free the packed copies of matrices, until the next step."""
        self._packed = None

    def _for_steps(self) -> tuple[list[Layer], Product]:
        """Return blocks and head with packed copies of the matrices as they are now."""
        versions = [weight._version for weight in self._matrices]
        if self._packed is None or self._packed[0] != versions:  # changed in place by anyone
            layers = [layer.pack(self._ops) for layer in self._layers]
            self._packed = versions, layers, self._head.pack(self._ops)
        return self._packed[1:]

    def _compile(self) -> CompiledStep | None:
        """Compile the steps of a small model as one call; None for a larger one, or if nothing is
        compiled.
        """
        ops, layers, head = self._ops, self._layers, self._head
        if not self._may_compile or not isinstance(ops, NativeOps):
            return None
        if not CompiledStep.suits(layers, head):
            return None
        return CompiledStep(
            ops, layers, norm=self._norm, head=head, head_width=self._width, eps=self._eps,
            scale=self._scale,
        )  # fmt: skip

    def where(self, rows: Sequence[tuple[int, int, int]]) -> Where:
        """Build the places of rows: computed tokens, slot of a shared prompt, and its tokens."""
        return Where.of(rows, self._norm.device)

    def step(self, tokens: Tensor, where: Where, store: RowStore, prompts: RowStore) -> Tensor:
        """Return logits [B, V] after one more token in each of rows 0 .. B-1."""
        ops, eps, width = self._ops, self._eps, self._width
        tables = self._angles(where.longest + where.longest_shared)
        if self._compiled is not None:
            return self._compiled(self._embed(tokens), where, store, prompts, tables)
        rows = len(tokens)
        idle = -rows % GRID if rows > GRID // 2 and self._by_onednn else 0
        x = self._embed(F.pad(tokens, (0, idle))).float()
        delta = None
        layers, head = self._for_steps()
        for number, layer in enumerate(layers):
            hidden = ops.add_norm(x, delta, layer.norm, eps)
            q = layer.q(hidden)[:rows].view(rows, -1, width)
            k = layer.k(hidden)[:rows].view(rows, -1, width)
            v = layer.v(hidden)[:rows].view(rows, -1, width)
            q = ops.rotate(q, layer.q_norm, tables, where.positions, eps)
            k = ops.rotate(k, layer.k_norm, tables, where.positions, eps)
            out = ops.attend(q, k, v, number, where, self._scale, store, prompts)
            out = F.pad(out.view(rows, -1), (0, 0, 0, idle))
            x, delta = self._mlp(x, layer.o(out), layer)
        return head(ops.add_norm(x, delta, self._norm, eps))[:rows]

    def several(
        self, tokens: Tensor, where: Where, store: RowStore, prompts: RowStore, rule: DrawRule,
        most: int,
    ) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
        """Decode and draw several tokens of each row in one call; None if steps are not compiled,
        or if a token that can be drawn has no embedding.
        """
        weight: Any = self._embed.weight
        if self._compiled is None or len(weight) < len(self._head[0]):
            return None
        tables = self._angles(where.longest + where.longest_shared + most - 1)
        return self._compiled.several(
            self._embed(tokens), where, store, prompts, tables, rule, weight, most
        )

    def read(
        self,
        store: RowStore,
        parts: Sequence[Sequence[int]],
        rows: Sequence[int],
        starts: Sequence[int],
        *,
        logits: bool,
    ) -> Tensor | None:
        """Compute keys and values of new tokens of some rows; return logits [N, V] only if
        requested.
        """
        device = self._norm.device
        one = Pass.of(store, parts, rows, starts, device=device)
        ops, eps, width = self._ops, self._eps, self._width
        tables = self._angles(one.total)
        x = self._embed(torch.tensor([t for p in parts for t in p], device=device)).float()
        delta = None
        for number, layer in enumerate(self._layers):
            hidden = ops.add_norm(x, delta, layer.norm, eps)
            k = layer.k(hidden).view(len(x), -1, width)
            v = layer.v(hidden).view(len(x), -1, width)
            k = ops.rotate(k, layer.k_norm, tables, one.write_at, eps)
            keys, values = store.layer(number, k[:, :, None])
            keys[one.write_row, :, one.write_at] = k
            values[one.write_row, :, one.write_at] = v
            if number == len(self._layers) - 1 and not logits:
                return None
            q = layer.q(hidden).view(len(x), -1, width)
            q = ops.rotate(q, layer.q_norm, tables, one.write_at, eps)
            out = self._attend(q, k, v, keys, values, one, new=not any(starts))
            x, delta = self._mlp(x, layer.o(out.reshape(len(x), -1)), layer)
        return self._head(ops.add_norm(x, delta, self._norm, eps))

    def _mlp(self, x: Tensor, delta: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return the residual, and the part that is still to be added to it."""
        hidden = self._ops.add_norm(x, delta, layer.mlp_norm, self._eps)
        gated = self._ops.silu_times(layer.gate(hidden), layer.up(hidden))
        return x, layer.down(gated)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, one: Pass, *, new: bool
    ) -> Tensor:
        """Attend with new tokens [N, H, D] of several rows over the tokens in these rows."""
        assert one.rows is not None
        if new:  # the rows contain only these
            all_keys, all_values, mask = one.padded(k), one.padded(v), None
        else:
            all_keys = keys[one.rows, :, : one.total]
            all_values = values[one.rows, :, : one.total]
            mask = one.mask(0)
        out = F.scaled_dot_product_attention(
            one.padded(q),
            all_keys,
            all_values,
            attn_mask=mask,
            is_causal=new,
            scale=self._scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out[one.entry, :, one.offset]

    def _angles(self, length: int) -> list[Tensor]:
        """Return cosines and sines [positions, D / 2]; both over D, sines signed; all in float32.

        They grow with the longest row.
        """
        if not self._tables or len(self._tables[0]) < length:
            size = max(256, 1 << (length - 1).bit_length())
            base: Any = self._model.base_model
            at = torch.arange(size, device=self._norm.device)[None]
            cosines, sines = (
                t[0] for t in base.rotary_emb(self._norm.new_zeros(1, dtype=torch.float32), at)
            )
            half = self._width // 2
            signed = torch.cat([-sines[:, :half], sines[:, half:]], -1)
            self._tables = [
                cosines[:, :half].contiguous(),
                sines[:, :half].contiguous(),
                cosines,
                signed,
            ]
        return self._tables


def make_lean(model: PreTrainedModel) -> Lean | None:
    """Make the lean pass of a model, verified on a specimen; None if there is none, and log
    why.
    """
    reason = unlike(model)
    if reason is None:
        dtype = next(model.parameters()).dtype
        lean = Lean(model, _ops(dtype))
        specimen = make_specimen(model.config, dtype=dtype, attention=NAME)
        worst = _difference(
            specimen, Lean(specimen, _ops(dtype), compiled=lean._compiled is not None)
        )
        if worst < _AGREEMENT[dtype]:
            logger.info("decoding by the lean pass, with %s", lean._ops.name)
            return lean
        reason = f"its log-probabilities differ by {worst:.3g}"
    logger.info("decoding by transformers' own pass, not the lean one: %s", reason)
    return None


def _ops(dtype: torch.dtype) -> PlainOps | NativeOps:
    if dtype not in (torch.float32, torch.bfloat16):
        return PlainOps()
    try:
        return NativeOps(dtype)
    except OSError as error:
        logger.info("decode steps are not compiled: %s", error)
        return PlainOps()


def unlike(model: PreTrainedModel) -> str | None:
    """Return why a model is not of the plain families; None if it is."""
    kind = model.config.model_type
    if kind not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return f"{type(model).__name__} is not one of transformers' {', '.join(FAMILIES)}"
    base: Any = model.base_model
    if base.norm.weight.device.type != "cpu":
        return f"the model is on {base.norm.weight.device.type}, and the lean pass needs the CPU"
    if base.norm.weight.dtype not in _AGREEMENT:
        return f"its weights are {base.norm.weight.dtype}"
    act = getattr(model.config, "hidden_act", None)
    if act not in ("silu", "swish"):
        return f"hidden_act is {act}"
    if base.rotary_emb.rope_type not in _ROPES:
        return f"rope_type is {base.rotary_emb.rope_type}"
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if getattr(config, "sliding_window", None) and "sliding_attention" in kinds:
        return "it has sliding windows"
    if 2 * len(base.rotary_emb.inv_freq) != base.layers[0].self_attn.head_dim:
        return "only a part of each head is rotated"
    others = {type(m).__name__ for m in model.modules() if _projects(m)} - {
        "Linear",
        "QuickLinear",
        "Embedding",
    }
    return f"it has layers of {', '.join(sorted(others))}" if others else None


def _projects(module: nn.Module) -> bool:
    """Return whether a module has its own matrix."""
    return any(
        parameter.ndim > 1 for parameter in module._parameters.values() if parameter is not None
    )


@torch.inference_mode()
def _difference(model: PreTrainedModel, lean: Lean) -> float:
    """Return the largest difference of log-probabilities between a specimen's two passes, over the
    scale of the logits.

    Three rows are tried: read whole, and token by token after a shared prefix of two of them, or
    none.
    """
    count = min(len(_linear(head)[0]) for head in (model.get_input_embeddings(), model.lm_head))
    rows = [[token % count for token in row] for row in _PROOF]
    expected = [_own_logits(model, row) for row in rows]
    store, prompts = RowStore(64), RowStore(64)
    store.reserve(len(rows), 16)
    prompts.reserve(1, 16)
    whole = lean.read(store, rows, [0, 1, 2], [0, 0, 0], logits=True)
    assert whole is not None
    pairs = [(whole, torch.cat(expected))]
    lean.read(prompts, [rows[0][:_SHARED]], [0], [0], logits=False)
    shared = torch.tensor([_SHARED, _SHARED, 0])
    where = Where(shared.clone(), torch.ones_like(shared), torch.zeros_like(shared), shared)
    for _ in range(len(rows[0]) - _SHARED):
        at = where.positions.tolist()
        tokens = torch.tensor([row[p] for row, p in zip(rows, at, strict=True)])
        logits = lean.step(tokens, where, store, prompts)
        pairs.append((logits, torch.stack([e[p] for e, p in zip(expected, at, strict=True)])))
        where.next()
    scale = max(1.0, float(torch.cat(expected).abs().max()))
    return max(
        float((log_probabilities(a.float()) - log_probabilities(b)).abs().max()) / scale
        for a, b in pairs
    )


def _own_logits(model: PreTrainedModel, row: list[int]) -> Tensor:
    """Compute logits [T, V] of a row by the module."""
    store = RowStore(len(row))
    store.reserve(1, len(row))
    one = Pass.of(store, [row], [0], [0], device=torch.device("cpu"))
    out = model(
        input_ids=torch.tensor([row]), position_ids=one.positions, use_cache=False, rows=one
    )
    return out.logits[0].float()


def _layer(block: Any) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return Layer(
        norm=block.input_layernorm.weight.detach(),
        q=_linear(attention.q_proj),
        k=_linear(attention.k_proj),
        v=_linear(attention.v_proj),
        q_norm=None if q_norm is None else q_norm.weight.detach(),
        k_norm=None if k_norm is None else k_norm.weight.detach(),
        o=_linear(attention.o_proj),
        mlp_norm=block.post_attention_layernorm.weight.detach(),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _linear(module: Any) -> Product:
    bias = getattr(module, "bias", None)
    bias = None if bias is None else bias.detach()
    return Product(module.weight.detach(), bias, getattr(module, "addition", None))

"""Critic: a model of its own that says what a state is worth, V [M], and learns it from returns.

A value head on a language model's hidden states: the value of entry m is read at the token before
it, where the policy stands when it samples. The head begins at 0. Saved as `critic/` beside
`actor/`.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trireme.batch import Batch
from trireme.trainer.attention import select
from trireme.trainer.model import hidden_states, load_model, once
from trireme.trainer.optim import Descent, OptimizerSettings
from trireme.trainer.pack import cut, pack

HEAD = "value_head.weight"


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float
) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (V_clip - R)^2) / 2 with V_clip within `clip_range` of V_old, and which clip.

    PPO's (arXiv:1707.06347) for values.
    """
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    plain, bounded = (values - returns).square(), (clipped - returns).square()
    return torch.maximum(plain, bounded) / 2, bounded > plain


class Critic:
    """One process, one device."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        optimizer: OptimizerSettings,
        max_token_len: int,
        total_steps: int | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        grad_clip: float = 1.0,
        clip_range: float = 0.5,
        share_prefix: bool = True,
        trust_remote_code: bool = False,
    ) -> None:
        """`clip_range` is how far a value may move in one update before it stops gaining."""
        self.model = load_model(model_path, device=device, trust_remote_code=trust_remote_code)
        self.device = torch.device(device)
        self.head = nn.Linear(self.model.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)
        self.head.to(self.device)
        # The base model alone: what turns hidden states into words has no part in a value.
        parameters = [*self.model.base_model.parameters(), *self.head.parameters()]
        self.descent = Descent(parameters, optimizer, total_steps, grad_clip=grad_clip)
        self._clip_range = clip_range
        self._max_token_len = max_token_len
        self._share_prefix = share_prefix
        self._half = dtype == "bfloat16" and self.device.type == "cuda"

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """V of the state before each entry [M], on the CPU."""
        out = torch.empty(batch.num_tokens)
        numbered = batch.with_fields(entry=torch.arange(batch.num_tokens))
        for part in cut(numbered, self._max_token_len, share_prefix=self._share_prefix):
            out[part.fields["entry"]] = self._values(part).cpu()
        return out

    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step towards the batch's `returns` from its `values`; metrics.

        Raises FloatingPointError where the gradient is not finite; nothing has moved then.
        """
        total = clipped = 0.0
        for part in cut(batch, self._max_token_len, share_prefix=self._share_prefix):
            old, returns = (part.fields[name].to(self.device) for name in ("values", "returns"))
            loss, hit = value_loss(self._values(part), old, returns, clip_range=self._clip_range)
            mean = loss.sum() / batch.num_tokens
            mean.backward()
            total += float(mean.detach())
            clipped += float(hit.sum()) / batch.num_tokens
        norm, lr = self.descent.move()
        if not math.isfinite(norm):
            step = self.descent.steps + 1
            raise FloatingPointError(f"critic step {step}: the gradient norm is {norm}")
        old, returns = batch.fields["values"], batch.fields["returns"]
        spread = returns.var(correction=0)
        explained = 1 - (returns - old).var(correction=0) / spread if spread > 0 else 0.0
        return {
            "critic/value_loss": total,
            "critic/clipfrac": clipped,
            "critic/grad_norm": norm,
            "critic/lr": lr,
            "critic/explained_variance": float(explained),
            "critic/value_mean": float(old.mean()),
        }

    def weights(self) -> dict[str, Tensor]:
        """The base model's, by Hugging Face names, and the head's, not copied."""
        return once(self.model.state_dict()) | {HEAD: self.head.weight.detach()}

    def state(self) -> dict[str, Any]:
        """Optimizer and schedule; the weights are apart."""
        return self.descent.state()

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Back to where `weights` and `state` were taken. ValueError for another model's."""
        own = self.weights()
        if odd := sorted(set(own) ^ set(weights)):
            raise ValueError(
                f"the saved critic is of another model: {len(odd)} tensors differ, {odd[0]} first"
            )
        for name, tensor in own.items():
            tensor.copy_(weights[name])
        self.descent.load_state(state)

    def _values(self, part: Batch) -> Tensor:
        layout = pack(part, share_prefix=self._share_prefix).to(self.device)
        with self._precision():
            hidden = hidden_states(self.model, layout)
            values = self.head(select(hidden, layout.predecessors))
        return values.squeeze(-1).float()

    def _precision(self) -> AbstractContextManager:
        return torch.autocast("cuda", torch.bfloat16) if self._half else nullcontext()

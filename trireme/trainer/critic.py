"""Critic: a model of its own that says what a state is worth, V [M], and learns it from returns.

A value head on a language model's hidden states: the value of entry m is read at the token before
it, where the policy stands when it samples. The head begins at 0. Saved as `critic/` beside
`actor/`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trireme.batch import Batch
from trireme.trainer.attention import select
from trireme.trainer.model import hidden_states, load_model
from trireme.trainer.optim import OptimizerSettings, Schedule, make_optimizer
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
        self._parameters = [*self.model.base_model.parameters(), *self.head.parameters()]
        self.optimizer = make_optimizer(self._parameters, optimizer)
        self.schedule = Schedule(optimizer, total_steps)
        self.steps = 0
        self._clip_range = clip_range
        self._grad_clip = grad_clip
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
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._grad_clip))
        if norm != norm or norm == float("inf"):
            raise FloatingPointError(f"critic step {self.steps + 1}: the gradient norm is {norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr(self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        old, returns = batch.fields["values"], batch.fields["returns"]
        spread = returns.var(correction=0)
        explained = 1 - (returns - old).var(correction=0) / spread if spread > 0 else 0.0
        return {
            "critic/value_loss": total,
            "critic/clipfrac": clipped,
            "critic/grad_norm": norm,
            "critic/lr": self.optimizer.param_groups[0]["lr"],
            "critic/explained_variance": float(explained),
            "critic/value_mean": float(old.mean()),
        }

    def weights(self) -> dict[str, Tensor]:
        """The base model's, by Hugging Face names, and the head's, not copied."""
        seen: set[int] = set()
        out: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            if tensor.data_ptr() not in seen:
                out[name] = tensor.detach()
            seen.add(tensor.data_ptr())
        return out | {HEAD: self.head.weight.detach()}

    def state(self) -> dict[str, Any]:
        """Optimizer and schedule; the weights are apart."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": {"last_epoch": self.steps},
        }

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
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["scheduler"]["last_epoch"]

    def _values(self, part: Batch) -> Tensor:
        layout = pack(part, share_prefix=self._share_prefix).to(self.device)
        with self._precision():
            hidden = hidden_states(self.model, layout)
            values = self.head(select(hidden, layout.predecessors))
        return values.squeeze(-1).float()

    def _precision(self) -> AbstractContextManager:
        return torch.autocast("cuda", torch.bfloat16) if self._half else nullcontext()

"""Learning: what the train steps of a run share beside the policy itself.

The critic, coefficients that adapt, how many steps there were, and, where data comes again epoch
after epoch, the reference model's scores of it. A resume needs `state`.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trireme.algorithms.kl import adapted
from trireme.algorithms.recipes import Recipe
from trireme.batch import Batch
from trireme.trainer.backend import Order, TrainerBackend
from trireme.trainer.critic import Critic


class Learning:
    """Made once for a run; changed by its train steps."""

    def __init__(
        self, recipe: Recipe, critic: Critic | None = None, *, critic_warmup: int = 0
    ) -> None:
        """`critic` where `recipe.needs_critic`; for `critic_warmup` steps it alone learns."""
        self.critic = critic
        self._critic_warmup = critic_warmup if critic is not None else 0
        self.steps = 0
        self.coefficients = {kind: part.coefficient for kind, part in recipe.parts.items()}
        self._settings = {kind: part.settings for kind, part in recipe.parts.items()}
        self._scores: dict[bytes, Tensor] | None = {} if recipe.from_data else None

    @property
    def trains_policy(self) -> bool:
        """Whether the policy learns in this step, and not the critic alone."""
        return self.steps >= self._critic_warmup

    def adapt(self, kind: str, divergence: float, count: int) -> None:
        """Move a KL coefficient towards its target, where it is adaptive."""
        settings = self._settings[kind]
        if settings.get("adaptive"):
            self.coefficients[kind] = adapted(
                self.coefficients[kind],
                divergence,
                count,
                target_kl=float(settings["target_kl"]),
                horizon=float(settings["horizon"]),
            )

    def reference(self, backend: TrainerBackend, batch: Batch) -> Tensor:
        """The reference's log-probabilities [M]; of a data set's row they are computed once."""
        if self._scores is None:
            return backend.logprobs(batch, reference=True)
        positions = batch.positions.split(batch.counts.tolist())
        names = [_digest(row, at) for row, at in zip(batch.tokens, positions, strict=True)]
        new = [n for n, name in enumerate(names) if name not in self._scores]
        if new:
            part = batch.select(new)
            found = backend.logprobs(part, reference=True).split(part.counts.tolist())
            self._scores |= {names[n]: row.clone() for n, row in zip(new, found, strict=True)}
        return torch.cat([self._scores[name] for name in names])

    def save_critic(self, backend: TrainerBackend, folder: Path) -> None:
        """Write the value model's files into a folder that all ranks see."""
        assert self.critic is not None, "there is none to save"
        order = Order("save_critic", {"folder": str(folder)})
        backend.together(order, partial(self.critic.save, folder))

    def load_critic(self, backend: TrainerBackend, folder: Path) -> None:
        """Back to where `save_critic` was called. ValueError where that was for another model."""
        assert self.critic is not None, "there is none to load"
        order = Order("load_critic", {"folder": str(folder.absolute())})
        backend.together(order, partial(self.critic.load, folder))

    def state(self) -> dict[str, Any]:
        """JSON values; the critic's tensors are in the checkpoint's own folder."""
        return {"steps": self.steps, "coefficients": self.coefficients}

    def load_state(self, state: dict[str, Any]) -> None:
        """Back to where `state` was taken."""
        self.steps = state["steps"]
        for kind, coefficient in state["coefficients"].items():
            if self._settings.get(kind, {}).get("adaptive"):  # others are as they are set now
                self.coefficients[kind] = coefficient


def _digest(tokens: Any, positions: Tensor) -> bytes:
    """A name for a sample's tokens and which of them are trained."""
    return hashlib.sha256(tokens.tobytes() + b"|" + positions.numpy().tobytes()).digest()

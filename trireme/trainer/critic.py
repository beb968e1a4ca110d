"""Critic: a value model, V [M], that learns from returns.

A value head on a language model's hidden states: the value of entry m is read at the token before
it, the state from which the policy samples. The head begins at 0. Saved as `critic/` next to
`actor/`. Several ranks spread and train it like the policy.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trireme.batch import Batch
from trireme.checkpoint.saved import read
from trireme.trainer.attention import Kernel, select
from trireme.trainer.measure import Arithmetic
from trireme.trainer.model import checkpoint_activations, read_entries
from trireme.trainer.pack import PackedBatch, pack_for
from trireme.trainer.ranks import Ranks, dummy
from trireme.trainer.settings import TrainSettings

HEAD = "value_head"


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float
) -> tuple[Tensor, Tensor]:
    """Return max((V - R)^2, (V_clip - R)^2) / 2 with V_clip within `clip_range` of V_old, and the
    clipped entries.

    This is PPO's loss (arXiv:1707.06347) for values.
    """
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    plain, bounded = (values - returns).square(), (clipped - returns).square()
    return torch.maximum(plain, bounded) / 2, bounded > plain


class Critic:
    """A value model on one device, or with `ranks` in one of many processes that make the same
    calls.
    """

    def __init__(
        self,
        model_path: str | Path,
        settings: TrainSettings,
        ranks: Ranks | None = None,
        *,
        clip_range: float,
    ) -> None:
        """`clip_range` is the distance by which a value may move in one update before the loss is
        flat.
        """
        self.device = ranks.device if ranks else torch.device(settings.device)
        self.model = settings.load(model_path, ranks)
        self._kernel: Kernel = settings.kernel(model_path, self.device, self.model)
        # The head that turns hidden states into words plays no part in a value.
        self.model.set_output_embeddings(None)
        width = self.model.config.get_text_config().hidden_size
        # Made on meta, which draws no random numbers: they belong to the policy.
        self.head = nn.Linear(width, 1, bias=False, device="meta")
        if not self.model.get_input_embeddings().weight.is_meta:
            self.head.to_empty(device="cpu" if ranks else settings.device)
        self.model.add_module(HEAD, self.head)
        if settings.gradient_checkpointing:
            checkpoint_activations(self.model)
        self.arithmetic = Arithmetic(self.model)
        self._root = settings.spread(self.model, ranks, model_path)
        nn.init.zeros_(self.head.weight)
        self.optimizer = settings.make_optimizer(self.model.parameters())
        self._team = settings.team(ranks, self.model)
        self._ranks = ranks
        self._settings = settings
        self._clip_range = clip_range

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """Return V of the state before each entry [M], on the CPU, equal on all ranks."""
        return self._team.scores(batch, self._root, lambda part: [self._values(part)])[0]

    def update(self, batch: Batch) -> dict[str, float]:
        """Do one optimizer step towards the batch's `returns` from its `values`; returns metrics.

        Raises FloatingPointError if the gradient is not finite; the weights are then unchanged.
        """
        total = clipped = 0.0
        self.model.train(self._settings.gradient_checkpointing)
        for part in self._team.rounds(batch, self._root):
            values = self._values(part or dummy())
            if part is None:
                (values.sum() * 0).backward()
                continue
            old, returns = (part.fields[name].to(self.device) for name in ("values", "returns"))
            loss, hit = value_loss(values, old, returns, clip_range=self._clip_range)
            mean = loss.sum() / batch.num_tokens
            mean.backward()
            total += float(mean.detach())
            clipped += float(hit.sum()) / batch.num_tokens
        self.model.eval()
        total, clipped = map(sum, zip(*self._team.gather([total, clipped]), strict=True))
        norm, lr = self.optimizer.step()
        if not math.isfinite(norm):
            step = self.optimizer.steps + 1
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
        """Return the base model's weights, by Hugging Face names, and the head's; not copied. This
        rank's part.
        """
        return dict(self.model.state_dict())

    def save(self, folder: Path) -> None:
        """Save the weights in one file, optimizer and schedule in one per rank. Raises OSError."""
        self._team.attempt(partial(self._team.write_own, folder, self.optimizer.state()))
        self._team.write_whole(folder, self.weights())

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, on any number of ranks. Raises ValueError for another model's
        files.
        """
        self._team.attempt(partial(self._load, folder))

    @torch.no_grad()
    def _load(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(
                f"{folder.parent} has no critic, which this algorithm needs: it was saved "
                "by another algorithm; take another name for this run"
            )
        saved = read(folder, self._team.rank)
        saved.fill(self.weights())
        optimizer = saved.optimizer_for(self.optimizer.inner)
        self.optimizer.load_state(saved.extra | {"optimizer": optimizer})

    def _values(self, part: Batch) -> Tensor:
        share = self._settings.share_prefix
        layout = pack_for(self.model, self.device, part, share_prefix=share, kernel=self._kernel)
        with self._settings.precision(self._ranks):
            return self._root(self._worth, layout).float()

    def _worth(self, model: PreTrainedModel, layout: PackedBatch) -> Tensor:
        """Compute the values within the root's forward, where its weights are whole."""

        def read_off(hidden: Tensor, at: Tensor, _: Tensor | slice) -> list[Tensor]:
            return [self.head(select(hidden, at)).squeeze(-1)]

        sequence = self._ranks.sequence if self._ranks else None
        return read_entries(model, layout, sequence, read_off)[0]

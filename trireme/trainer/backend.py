"""Backend: holds the trained weights, their optimizer and the reference model.

On a CPU all is float32. On a GPU with dtype bfloat16 the weights, gradients and optimizer stay
float32 and the forward pass runs in bfloat16 (autocast); log-probabilities are float32 always.

Invariants:
- gradients add up over micro-batches and do not depend on how a batch is cut;
- a step whose loss or gradient is not finite changes no weight and names the sample;
- tied weights appear once in `weights`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trireme.batch import Batch, of_tokens
from trireme.checkpoint.layout import LORA_ADAPTER
from trireme.checkpoint.save import save_whole
from trireme.checkpoint.saved import read
from trireme.experience import Experience
from trireme.trainer.lora import Adapter, Lora
from trireme.trainer.model import checkpoint_activations, load_model, once, token_logprobs
from trireme.trainer.optim import Descent, OptimizerSettings
from trireme.trainer.pack import cut
from trireme.trainer.randomness import random_state, set_random_state

# (part of the batch, logprobs [M], entropies [M] or None) -> what the part adds to the loss.
LossFunction = Callable[[Batch, Tensor, "Tensor | None"], Tensor]


T = TypeVar("T")


class NotFinite(RuntimeError):
    """A loss or gradient is NaN or infinite."""


@dataclass(frozen=True)
class Order:
    """What all ranks are to do now."""

    what: str
    options: dict[str, Any] = field(default_factory=dict)
    """JSON values."""
    experiences: Sequence[Experience] = ()


class TrainerBackend(Protocol):
    """What a train step, the synchronizer and a checkpoint need of the trained model."""

    def forward_backward(self, batch: Batch, loss: LossFunction, *, entropy: bool = False) -> None:
        """Add the gradient of the batch's loss, one micro-batch after the other."""
        ...

    def step(self) -> dict[str, float]:
        """Move the weights by the gradients so far and forget them."""
        ...

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """log p of each entry [M], of the trained or the reference model; on the CPU."""
        ...

    def scores(self, batch: Batch) -> Tensor:
        """Of each entry log p, the entropy H, and the mean of p (H + log p) over the vocabulary
        [3, M], of the trained model; on the CPU.
        """
        ...

    def score(self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """log p of every token of plain rows; index 0 is 0."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The trained weights as they are now, by Hugging Face names, not copied."""
        ...

    def each_weight(self) -> Generator[tuple[str, Tensor]]:
        """`weights` one after the other, each whole; what is sharded is gathered as it is asked
        for, so that no rank holds them all.
        """
        ...

    def together(self, order: Order, work: Callable[[], T]) -> T:
        """`work()`, with every other rank told to do the same; inside such work plain `work()`."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank that had a share of the batch to itself."""
        ...

    def save(self, actor: Path, *, hf: bool) -> None:
        """Write all that a run needs to go on into a folder; `hf`: and as others load weights."""
        ...

    def load(self, actor: Path) -> None:
        """Back to where `save` was called, by this backend or another."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resume needs beside the weights; `torch.load(weights_only=True)` reads it."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Back to where `state` was taken."""
        ...


class TorchBackend:
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
        lora: Lora | None = None,
        gradient_checkpointing: bool = False,
        reference: bool = False,
        reference_path: str | Path | None = None,
        share_prefix: bool = True,
        trust_remote_code: bool = False,
        seed: int = 0,
    ) -> None:
        """`reference` keeps the model as it is now (or that of `reference_path`) for KL terms, and
        `seed` is of all that training draws.
        """
        self.device = torch.device(device)
        self.module = load_model(model_path, device=device, trust_remote_code=trust_remote_code)
        self.adapter: Adapter | None = None
        self._reference: PreTrainedModel | None = None
        self._has_reference = reference
        if reference and reference_path is not None:
            self._reference = load_model(
                reference_path, device=device, trust_remote_code=trust_remote_code
            ).requires_grad_(False)
        elif reference and lora is None:
            self._reference = copy.deepcopy(self.module).requires_grad_(False)
        torch.manual_seed(seed)  # an adapter's first weights, and dropout
        if lora is not None:
            self.adapter = Adapter(self.module, lora)
        # Dropout in an adapter and checkpointing are the only things that tell training apart.
        self._train_mode = gradient_checkpointing or bool(lora and lora.dropout)
        if gradient_checkpointing:
            checkpoint_activations(self.module)
        self.descent = Descent(
            self.module.parameters(), optimizer, total_steps, grad_clip=grad_clip
        )
        self._half = dtype == "bfloat16" and self.device.type == "cuda"
        self._max_token_len = max_token_len
        self._share_prefix = share_prefix
        self._since_step: list[tuple[Batch, LossFunction, bool]] = []
        self._micro_batches = 0

    def forward_backward(self, batch: Batch, loss: LossFunction, *, entropy: bool = False) -> None:
        """See TrainerBackend. Raises NotFinite where the loss does."""
        self._since_step.append((batch, loss, entropy))
        self.module.train(self._train_mode)
        for part in cut(batch, self._max_token_len, share_prefix=self._share_prefix):
            self._micro_batches += 1
            self._gradient(part, loss, entropy)
        self.module.eval()

    def step(self) -> dict[str, float]:
        """See TrainerBackend. Raises NotFinite naming a sample, and moves nothing."""
        norm, lr = self.descent.move()
        if not math.isfinite(norm):
            step = self.descent.steps + 1
            raise NotFinite(f"train step {step}: the gradient norm is {norm}; {self._blame()}")
        metrics = {
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "perf/micro_batches": float(self._micro_batches),
        }
        self._since_step.clear()
        self._micro_batches = 0
        return metrics

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """See TrainerBackend."""
        return self._scores(batch, reference=reference)[0]

    def scores(self, batch: Batch) -> Tensor:
        """See TrainerBackend."""
        return self._scores(batch, entropy=True)

    @torch.no_grad()
    def _scores(self, batch: Batch, *, reference: bool = False, entropy: bool = False) -> Tensor:
        """log p [1, M]; with `entropy` all of `scores`, [3, M]."""
        assert self._has_reference or not reference, (
            "this backend was made without a reference model"
        )
        model = self._reference if reference and self._reference is not None else self.module
        off = reference and model is self.module and self.adapter is not None
        out = torch.empty(3 if entropy else 1, batch.num_tokens)
        index = torch.arange(batch.num_tokens)
        numbered = batch.with_fields(entry=index)
        with self.adapter.disabled() if off and self.adapter else nullcontext():
            for part in cut(numbered, self._max_token_len, share_prefix=self._share_prefix):
                with self._precision():
                    got = token_logprobs(
                        model, part, entropy=entropy, share_prefix=self._share_prefix
                    )
                rows = torch.vstack([values for values in got if values is not None])
                out[:, part.fields["entry"]] = rows.cpu()
        return out

    def score(self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """See TrainerBackend."""
        batch = of_tokens(ids, temperature=temperature)
        rows = self.logprobs(batch).split(batch.counts.tolist())
        return [[0.0, *row.tolist()] for row in rows]

    def weights(self) -> dict[str, Tensor]:
        """See TrainerBackend. With LoRA: merged, in new tensors for the layers concerned."""
        return once(self.adapter.merged() if self.adapter else self.module.state_dict())

    def each_weight(self) -> Generator[tuple[str, Tensor]]:
        """See TrainerBackend."""
        yield from self.weights().items()

    def together(self, order: Order, work: Callable[[], T]) -> T:
        """See TrainerBackend: there are no others."""
        return work()

    def gather(self, value: Any) -> list[Any]:
        """See TrainerBackend."""
        return [value]

    def save(self, actor: Path, *, hf: bool) -> None:
        """See TrainerBackend."""
        extra = self.state()
        save_whole(
            actor, weights=self.weights(), optimizer=extra.pop("optimizer"), extra=extra, hf=hf
        )
        if self.adapter:
            self.adapter.save(actor / LORA_ADAPTER, extra["adapter"])

    def load(self, actor: Path) -> None:
        """See TrainerBackend. Raises ValueError for the files of another model."""
        saved = read(actor)
        saved.refuse_other(lora=self.adapter is not None)
        if self.adapter is None:
            saved.fill(self.weights())
        self.load_state(saved.extra | {"optimizer": saved.optimizer_for(self.descent.optimizer)})

    def state(self) -> dict[str, Any]:
        """Optimizer, schedule and random state; with LoRA the adapter too."""
        state = self.descent.state() | {"rng": random_state(self.device)}
        if self.adapter:
            state["adapter"] = self.adapter.weights()
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """See TrainerBackend. The weights are those that the backend was made from."""
        self.descent.load_state(state)
        set_random_state(state["rng"], self.device)
        if self.adapter:
            self.adapter.load(state["adapter"])

    def _gradient(self, part: Batch, loss: LossFunction, entropy: bool) -> None:
        """Add the gradient of one micro-batch."""
        with self._precision():
            logprobs, entropies = token_logprobs(
                self.module, part, entropy=entropy, share_prefix=self._share_prefix
            )
        loss(part, logprobs, entropies).backward()

    def _precision(self) -> AbstractContextManager:
        """bfloat16 autocast on a GPU that was asked for it."""
        return torch.autocast("cuda", torch.bfloat16) if self._half else nullcontext()

    def _blame(self) -> str:
        """Which sample's own gradient is not finite. Slow: one sample after the other."""
        for batch, loss, entropy in self._since_step:
            for sample in range(batch.num_samples):
                if not batch.counts[sample]:
                    continue
                self.descent.optimizer.zero_grad()
                self._gradient(batch.select([sample]), loss, entropy)
                grads = [p.grad for p in self.module.parameters() if p.grad is not None]
                if not all(bool(torch.isfinite(g).all()) for g in grads):
                    return f"the gradient of experience {batch.eids[sample]} is not finite"
        return "no single experience's gradient is: only their sum overflows"

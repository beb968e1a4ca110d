"""Backend: the trained weights, their optimizer and the reference model, on one rank or alone.

Every rank calls the same methods in the same order; on rank 0 trainer/led.py forwards them to the
others. On a CPU plans compute in float32. With dtype bfloat16 the weights, gradients and optimizer
stay float32 and the forward pass runs in bfloat16; log-probabilities are float32 always.

Invariants:
- gradients are summed over micro-batches and ranks, and do not depend on how a batch is cut;
- a step whose loss or gradient is not finite changes no weight and names the sample;
- tied weights appear once in `weights`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trireme.batch import Batch, of_tokens
from trireme.checkpoint.layout import REFERENCE
from trireme.checkpoint.saved import random_state, read, set_random_state
from trireme.engines.device import sums_in_order
from trireme.trainer.lora import Adapter, Part
from trireme.trainer.measure import Measures
from trireme.trainer.model import (
    checkpoint_activations,
    token_logprobs,
)
from trireme.trainer.ranks import (
    NotFinite,
    Ranks,
    Root,
    dummy,
    my_part,
    whole,
)
from trireme.trainer.settings import TrainSettings
from trireme.trainer.write import Writing

# (part of the batch, logprobs [M], entropies [M] or None) -> the part's contribution to the loss.
LossFunction = Callable[[Batch, Tensor, "Tensor | None"], Tensor]


class Backend:
    """The trained weights on this rank. All ranks make the same calls; without ranks there is one
    process with one device.
    """

    def __init__(
        self,
        model_path: str | Path,
        settings: TrainSettings,
        ranks: Ranks | None = None,
        *,
        reference: bool = False,
    ) -> None:
        """`reference` keeps the model as it is now for KL terms; with LoRA the adapter alone."""
        self.ranks = ranks
        self.device = ranks.device if ranks else torch.device(settings.device)
        self._settings = settings
        self.replays_routing = settings.replays_routing
        self._reference: Root | None = None
        self._has_reference = reference
        self._reference_moved = False
        if reference and settings.lora is None:  # first, so that only one model at a time is whole
            frozen = settings.load(model_path, ranks, frozen=True)
            self._reference = settings.spread(frozen, ranks, model_path).eval()
        self.module = settings.load(model_path, ranks)
        self._kernel = settings.kernel(model_path, self.device, self.module)
        self.towers = settings.frozen_names(self.module)
        torch.manual_seed(settings.seed)  # an adapter's first weights, equal on all ranks; dropout
        lora = settings.lora
        self.adapter = None if lora is None else Adapter(self.module, lora)
        if self.adapter and reference:
            self.adapter.keep_start()
        self.module.eval()  # which an adapter's new layers are not
        # Only dropout in an adapter and checkpointing behave differently in training.
        self._train_mode = settings.gradient_checkpointing or bool(lora and lora.dropout)
        if settings.gradient_checkpointing:
            checkpoint_activations(self.module)
        watched = [self.module, *([self._reference.model] if self._reference else [])]
        self.measures = Measures(
            self.device, watched, half=settings.half, tflops=settings.peak_tflops
        )
        self._root = settings.spread(self.module, ranks, model_path)
        self.optimizer = settings.make_optimizer(self.module.parameters())
        self._team = settings.team(ranks, self.module)
        self.rank, self.num_ranks = self._team.rank, self._team.size
        self._since_step: list[tuple[Batch, LossFunction, bool]] = []
        self._micro_batches = 0
        self._writing: Writing | None = None

    def in_order(self) -> AbstractContextManager:
        """Return the context of a train step: a deterministic run sums in a fixed order."""
        return sums_in_order(self.device) if self._settings.deterministic else nullcontext()

    def forward_backward(self, batch: Batch, loss: LossFunction, *, entropy: bool = False) -> None:
        """Add the gradient of the batch's loss, one micro-batch after the other.

        An error of the loss on one rank (such as NotFinite) is raised on all.
        """
        self._since_step.append((batch, loss, entropy))
        self._root.train(self._train_mode)
        error: Exception | None = None
        for part in self._team.rounds(batch, self._root):
            self._micro_batches += part is not None
            error = self._gradient(part if error is None else None, loss, entropy) or error
        self._root.eval()
        self._team.agree(error)

    def step(self) -> dict[str, float]:
        """Update the weights from the accumulated gradients and reset these.

        Raises NotFinite naming a sample, and changes nothing.
        """
        norm, lr = self.optimizer.step()
        if not math.isfinite(norm):
            step = self.optimizer.steps + 1
            raise NotFinite(
                f"optimizer step {step}: the gradient norm is {norm}; {self._blame()}; if the "
                f"weights have diverged, algorithm.optimizer.lr ({lr:g}) is too large"
            )
        metrics = {
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "perf/micro_batches": float(sum(self.gather(self._micro_batches))),
        }
        self._since_step.clear()
        self._micro_batches = 0
        return metrics

    def broken_weights(self) -> list[str]:
        """Return the names of this rank's weights that have a NaN or an infinite number."""
        named = {name: my_part(p.detach()) for name, p in self.module.named_parameters()}
        named = {name: tensor for name, tensor in named.items() if tensor.numel()}
        largest = torch.nn.utils.get_total_norm(list(named.values()), norm_type=math.inf)
        if math.isfinite(float(largest)):
            return []
        return [name for name, tensor in named.items() if not bool(tensor.isfinite().all())]

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return log p of each entry [M], of the trained or the reference model; on every rank's
        CPU.
        """
        return self._scores(batch, reference=reference)[0]

    def scores(self, batch: Batch) -> Tensor:
        """Return log p, the entropy H, and the mean of p (H + log p) over the vocabulary of each
        entry [3, M], by the trained model; on every rank's CPU.
        """
        return self._scores(batch, entropy=True)

    def score(self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Return log p of every token of plain rows; index 0 is 0."""
        batch = of_tokens(ids, temperature=temperature)
        rows = self.logprobs(batch).split(batch.counts.tolist())
        return [[0.0, *row.tolist()] for row in rows]

    @torch.no_grad()
    def move_reference(self, alpha: float) -> None:
        """Set the reference to `alpha` of the trained weights and 1 - `alpha` of its old ones."""
        trained = dict(self.module.state_dict())
        for name, tensor in self._reference_shards().items():
            tensor.copy_(torch.lerp(tensor.float(), trained[name].float(), alpha))
        self._reference_moved = True

    def _reference_shards(self) -> dict[str, Tensor]:
        """Return the reference's weights on this rank, tied ones once; changed in place."""
        assert self._reference is not None, "this backend has no reference of its own"
        model = self._reference.model
        state = model.state_dict()
        return {name: state[name].detach() for name, _ in model.named_parameters()}

    def weights(self, part: Part = "merged") -> dict[str, Tensor]:
        """Return the current trained weights, or a part of them, by Hugging Face names.

        In one process they are not copied; with LoRA they are merged one layer after the other into
        the CPU's memory; with ranks they are whole, on this rank's CPU.
        """
        if self.ranks is None and (self.adapter is None or part == "adapter"):
            return dict(self.each_shard(part))
        return {name: tensor.cpu() for name, tensor in self.each_weight(part=part)}

    def each_weight(
        self, dtype: str | None = None, part: Part = "merged"
    ) -> Generator[tuple[str, Tensor]]:
        """Yield `weights` one after the other, each whole; shards are gathered on demand, so that
        no rank needs memory for all. Every rank goes through all of them.

        `dtype`: floating point is cast to it before it travels between ranks. An adapter is in the
        engines' form.
        """
        to = getattr(torch, dtype or "", None)
        gathered = ((name, whole(_cast(tensor, to))) for name, tensor in self.each_shard(part))
        for item in gathered:
            try:
                yield item
            except GeneratorExit:
                for _ in gathered:
                    pass  # the other ranks do not know that the rest is not needed
                raise

    def each_shard(self, part: Part = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield each weight's part on this rank, by Hugging Face names, tied ones once."""
        if part == "adapter":
            assert self.adapter is not None
            return self.adapter.travelling()
        named: Iterable[tuple[str, Tensor]] = self.module.state_dict().items()
        if self.adapter:
            merges = part in ("merged", "text")
            named = self.adapter.each_merged() if merges else self.adapter.each_base()
        seen = {name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())}
        names = {self.adapter.plain_name(name) for name in seen} if self.adapter else seen
        if part == "text":
            names -= self.towers
        elif part == "towers":
            names &= self.towers
        return ((name, tensor.detach()) for name, tensor in named if name in names)

    def unmoved(self, dtype: str) -> dict[str, float]:
        """Return the fingerprints of weights that no push sends; here every weight is sent."""
        return {}

    def gather(self, value: Any, *, every: bool = False) -> list[Any]:
        """Gather a JSON value of each rank that had its own share of the batch, or of
        `every` rank.
        """
        return self._team.gather(value, every=every)

    def save(self, actor: Path, *, hf: bool) -> None:
        """Write all that a run needs to resume into a folder that all ranks see.

        Each rank writes its own files; with `hf` also its rows of the exported weights.
        """
        self.begin_save(actor, hf=hf)
        self.end_save()

    def begin_save(self, actor: Path, *, hf: bool, behind: bool = False) -> None:
        """Begin to `save`; later training does not change the written state.

        `behind`: each rank writes a copy in the CPU's memory, in a thread; otherwise all is written
        now.
        """
        export = self._settings.export_dtype if hf else None
        alone = self.ranks is None
        self._writing = Writing(self._team, self, actor, export, alone=alone, behind=behind)
        if self._reference_moved:  # otherwise it is in the folder that the run began from
            self._team.write_whole((actor / REFERENCE).parent, self._reference_shards())

    def await_save(self) -> None:
        """Wait until this rank has written its files, in any thread; `end_save` raises errors."""
        if self._writing is not None:
            self._writing.wait()

    def end_save(self) -> None:
        """Wait until everything is written. Raises any rank's write error."""
        assert self._writing is not None, "a save has begun"
        self._writing.end()
        self._writing = None

    def load(self, actor: Path) -> None:
        """Restore what `save` wrote, on any number of ranks."""
        self._team.attempt(partial(self._load, actor))

    def state(self) -> dict[str, Any]:
        """Return the state that a resume needs besides the weights: this rank's part of the
        optimizer, schedule and random state, the LoRA adapter whole.
        `torch.load(weights_only=True)` reads it.
        """
        state = self.optimizer.state() | {"rng": random_state(self.device)}
        if self.adapter:
            weights = self.adapter.weights().items()
            state["adapter"] = {name: whole(tensor).cpu() for name, tensor in weights}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. The weights are those with which the backend was made."""
        self.optimizer.load_state(state)
        set_random_state(state["rng"], self.device)
        if self.adapter:
            self.adapter.load(state["adapter"])

    def _load(self, actor: Path) -> None:
        saved = read(actor, self._team.rank)
        saved.refuse_other(lora=self.adapter is not None)
        if self.adapter is None:
            saved.fill(dict(self.each_shard()))
        if self._reference is not None and saved.fill_reference(self._reference_shards()):
            self._reference_moved = True
        if self.adapter is not None:  # refuses other layers, whose optimizer's state cannot be read
            self.adapter.load(saved.extra["adapter"])
        self.load_state(saved.extra | {"optimizer": saved.optimizer_for(self.optimizer.inner)})

    @torch.no_grad()
    def _scores(self, batch: Batch, *, reference: bool = False, entropy: bool = False) -> Tensor:
        """Return log p [1, M]; with `entropy` all of `scores`, [3, M]."""
        assert self._has_reference or not reference, (
            "this backend was made without a reference model"
        )
        root = self._reference if reference and self._reference is not None else self._root
        start = reference and root is self._root and self.adapter is not None
        if reference:  # other weights, whose routers choose by themselves
            batch = replace(batch, routed_experts=())
        compute = partial(self._logprobs, root, entropy=entropy)
        with self.adapter.reference() if start and self.adapter else nullcontext():
            return self._team.scores(batch, root, compute, num=3 if entropy else 1)

    def _logprobs(
        self, root: Root, part: Batch, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        with self._settings.precision(self.ranks):
            return root(
                token_logprobs,
                part,
                entropy=entropy,
                share_prefix=self._settings.share_prefix,
                kernel=self._kernel,
                sequence=self.ranks.sequence if self.ranks else None,
            )

    def _gradient(self, part: Batch | None, loss: LossFunction, entropy: bool) -> Exception | None:
        """Add the gradient of one micro-batch, or 0. An error of the loss is returned: other ranks
        are in the backward pass, which needs this rank too.
        """
        logprobs, entropies = self._logprobs(self._root, part or dummy(), entropy=entropy)
        error: Exception | None = None
        total = logprobs.sum() * 0  # a gradient of 0: every rank has to make the backward pass
        if part is not None:
            try:
                part_loss = loss(part, logprobs, entropies)
                if not part_loss.requires_grad:
                    raise ValueError("the loss does not depend on the log-probabilities")
                total = part_loss
            except Exception as raised:
                error = raised
        total.backward()
        return error

    def _blame(self) -> str:
        """Name the sample whose own gradient is not finite. Slow: one sample after the other."""
        is_first = self.ranks is None or self.ranks.data_rank == 0
        for batch, loss, entropy in self._since_step:
            for sample in range(batch.num_samples):
                if not batch.counts[sample]:
                    continue
                self.optimizer.inner.zero_grad()
                self._gradient(batch.select([sample]) if is_first else None, loss, entropy)
                grads = [p.grad for p in self.module.parameters() if p.grad is not None]
                norm = float(whole(torch.nn.utils.get_total_norm(grads)))
                if not math.isfinite(norm):
                    return f"the gradient of experience {batch.eids[sample]} is not finite"
        return "no single experience's gradient is: only their sum overflows"


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

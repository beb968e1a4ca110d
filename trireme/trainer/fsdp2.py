"""Fsdp2: the trained model in shards over several ranks, each of which computes a share of a batch.

Every rank calls the same methods in the same order; `Orders` has rank 0 tell the others.

The invariants are those of the backend of one process and of a team.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trireme.batch import Batch, of_tokens
from trireme.checkpoint.layout import FSDP_CONFIG, LORA_ADAPTER, WEIGHTS, rank_file
from trireme.checkpoint.save import write_pt
from trireme.checkpoint.saved import read
from trireme.files import write_json
from trireme.trainer import ulysses
from trireme.trainer.backend import LossFunction, NotFinite, Order
from trireme.trainer.lora import Adapter, Lora
from trireme.trainer.model import checkpoint_activations, load_model, token_logprobs
from trireme.trainer.optim import Descent, OptimizerSettings
from trireme.trainer.orders import Orders
from trireme.trainer.randomness import random_state, set_random_state
from trireme.trainer.ranks import Ranks
from trireme.trainer.shard import Root, shard, whole
from trireme.trainer.team import Team, dummy
from trireme.trainer.ulysses import sliced_logprobs

T = TypeVar("T")


class Fsdp2Backend:
    """One rank of many, one device."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        ranks: Ranks,
        optimizer: OptimizerSettings,
        max_token_len: int,
        total_steps: int | None = None,
        dtype: str = "float32",
        grad_clip: float = 1.0,
        lora: Lora | None = None,
        gradient_checkpointing: bool = False,
        reference: bool = False,
        reference_path: str | Path | None = None,
        share_prefix: bool = True,
        offload: bool = False,
        trust_remote_code: bool = False,
        seed: int = 0,
        orders: Orders | None = None,
    ) -> None:
        """See TorchBackend. `orders`: how rank 0 has the others follow; None: they call alike."""
        self.ranks = ranks
        self.device = ranks.device
        half = dtype == "bfloat16" and self.device.type == "cuda"
        self._sequence = ranks.sequence

        def load(path: str | Path) -> PreTrainedModel:
            model = load_model(path, device="cpu", trust_remote_code=trust_remote_code)
            if self._sequence is not None:
                ulysses.switch(model, self._sequence)
            return model

        self._reference: Root | None = None
        self._has_reference = reference
        if reference and (reference_path is not None or lora is None):
            model = load(reference_path or model_path).requires_grad_(False)
            self._reference = shard(model, ranks.mesh, half=half, offload=offload).eval()
        self.module = load(model_path)
        torch.manual_seed(seed)  # adapters begin alike on every rank
        self.adapter: Adapter | None = None if lora is None else Adapter(self.module, lora)
        self._train_mode = gradient_checkpointing or bool(lora and lora.dropout)
        if gradient_checkpointing:
            checkpoint_activations(self.module)
        self._root = shard(self.module, ranks.mesh, half=half, offload=offload)
        self.descent = Descent(
            self.module.parameters(), optimizer, total_steps, grad_clip=grad_clip
        )
        self._team = Team(ranks, max_token_len=max_token_len, share_prefix=share_prefix)
        self._share_prefix = share_prefix
        self._since_step: list[tuple[Batch, LossFunction, bool]] = []
        self._micro_batches = 0
        self._orders = orders

    def forward_backward(self, batch: Batch, loss: LossFunction, *, entropy: bool = False) -> None:
        """See TrainerBackend. What the loss raises on one rank is raised on all."""
        self._since_step.append((batch, loss, entropy))
        self._root.train(self._train_mode)
        error: Exception | None = None
        for part in self._team.parts(batch):
            self._micro_batches += part is not None
            error = self._gradient(part if error is None else None, loss, entropy) or error
        self._root.eval()
        self._team.agree(error)

    def step(self) -> dict[str, float]:
        """See TrainerBackend. Raises NotFinite naming a sample, and moves nothing."""
        norm, lr = self.descent.move()
        if not math.isfinite(norm):
            step = self.descent.steps + 1
            raise NotFinite(f"train step {step}: the gradient norm is {norm}; {self._blame()}")
        metrics = {
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "perf/micro_batches": float(sum(self.gather(self._micro_batches))),
        }
        self._since_step.clear()
        self._micro_batches = 0
        return metrics

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """See TrainerBackend. All ranks get all of them."""
        return self._scores(batch, reference=reference)[0]

    def scores(self, batch: Batch) -> Tensor:
        """See TrainerBackend. All ranks get all of them."""
        return self._scores(batch, entropy=True)

    @torch.no_grad()
    def _scores(self, batch: Batch, *, reference: bool = False, entropy: bool = False) -> Tensor:
        """log p [1, M]; with `entropy` all of `scores`, [3, M]."""
        assert self._has_reference or not reference, (
            "this backend was made without a reference model"
        )
        root = self._reference if reference and self._reference is not None else self._root
        off = reference and root is self._root and self.adapter is not None
        compute = partial(self._logprobs, root, entropy=entropy)
        with self.adapter.disabled() if off and self.adapter else nullcontext():
            return self._team.scores(batch, compute, num=3 if entropy else 1)

    def score(self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """See TrainerBackend."""
        order = Order("score", {"ids": [list(row) for row in ids], "temperature": temperature})
        batch = of_tokens(ids, temperature=temperature)
        logprobs = self.together(order, lambda: self.logprobs(batch))
        return [[0.0, *row.tolist()] for row in logprobs.split(batch.counts.tolist())]

    def weights(self) -> dict[str, Tensor]:
        """All weights whole, on this rank's CPU."""
        return {name: tensor.cpu() for name, tensor in self.each_weight()}

    def each_weight(self) -> Generator[tuple[str, Tensor]]:
        """See TrainerBackend. Told to all; the other ranks go through them and drop them."""
        self.together(Order("each_weight"), lambda: None)
        gathered = ((name, whole(tensor)) for name, tensor in self.each_shard())
        while (item := self._guarded(lambda: next(gathered, None))) is not None:
            try:
                yield item
            except GeneratorExit:
                while self._guarded(lambda: next(gathered, None)) is not None:
                    pass  # the other ranks do not know that nobody wants the rest
                raise

    def each_shard(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of each weight, by Hugging Face names, tied ones once; LoRA merged."""
        named = self.adapter.each_merged() if self.adapter else self.module.state_dict().items()
        seen = {name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())}
        own = {self.adapter.plain_name(name) for name in seen} if self.adapter else seen
        return ((name, tensor.detach()) for name, tensor in named if name in own)

    def together(self, order: Order, work: Callable[[], T]) -> T:
        """See TrainerBackend. Raises RankLost on rank 0 where another rank is gone."""
        return self._orders.together(order, work) if self._orders else work()

    def gather(self, value: Any) -> list[Any]:
        """See TrainerBackend."""
        return self._team.gather(value)

    def save(self, actor: Path, *, hf: bool) -> None:
        """See TrainerBackend. Each rank writes its own files; the folder is one that all see."""
        order = Order("save", {"actor": str(actor), "hf": hf})
        self.together(order, partial(self._save, actor, hf))

    def load(self, actor: Path) -> None:
        """See TrainerBackend. Each rank reads the rows that it holds."""
        order = Order("load", {"actor": str(actor.absolute())})
        self.together(order, lambda: self._team.attempt(partial(self._load, actor)))

    def state(self) -> dict[str, Any]:
        """This rank's part of the optimizer, schedule and random state; the LoRA adapter whole."""
        state = self.descent.state() | {"rng": random_state(self.device)}
        if self.adapter:
            weights = self.adapter.weights().items()
            state["adapter"] = {name: whole(tensor).cpu() for name, tensor in weights}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """See TrainerBackend."""
        self.descent.load_state(state)
        set_random_state(state["rng"], self.device)
        if self.adapter:
            self.adapter.load(state["adapter"])

    def _save(self, actor: Path, hf: bool) -> None:
        rank, world = self.ranks.rank, self.ranks.world
        shards, state = dict(self.each_shard()), self.state()

        def own() -> None:
            write_pt(actor / rank_file("model", world, rank), shards)
            self._team.write_own(actor, state)
            if rank == 0:
                write_json(actor / FSDP_CONFIG, {"FSDP_version": 2, "world_size": world})
            if rank == 0 and self.adapter:
                self.adapter.save(actor / LORA_ADAPTER, state["adapter"])

        self._team.attempt(own)
        if hf:
            self._team.write_whole(actor / "huggingface" / WEIGHTS, shards)

    def _load(self, actor: Path) -> None:
        saved = read(actor, self.ranks.rank)
        saved.refuse_other(lora=self.adapter is not None)
        if self.adapter is None:
            saved.fill(dict(self.each_shard()))
        self.load_state(saved.extra | {"optimizer": saved.optimizer_for(self.descent.optimizer)})

    def _logprobs(
        self, root: Root, part: Batch, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See `token_logprobs`. Alike on ranks that share a sequence."""
        if self._sequence is not None:
            return root(
                sliced_logprobs,
                part,
                self._sequence,
                entropy=entropy,
                share_prefix=self._share_prefix,
            )
        return root(token_logprobs, part, entropy=entropy, share_prefix=self._share_prefix)

    def _gradient(self, part: Batch | None, loss: LossFunction, entropy: bool) -> Exception | None:
        """Add the gradient of one micro-batch, or 0. What the loss raises comes back: others are
        in the backward pass, which needs this rank too.
        """
        logprobs, entropies = self._logprobs(self._root, part or dummy(), entropy=entropy)
        total, error = logprobs.sum() * 0, None
        if part is not None:
            try:
                own = loss(part, logprobs, entropies)
                if not own.requires_grad:
                    raise ValueError("the loss does not depend on the log-probabilities")
                total = own
            except Exception as raised:
                error = raised
        total.backward()
        return error

    def _guarded(self, work: Callable[[], T]) -> T:
        """`work()`, which the other ranks are at already; see `together`."""
        return self._orders.guarded(work) if self._orders else work()

    def _blame(self) -> str:
        """Which sample's own gradient is not finite. Slow: one sample after the other."""
        for batch, loss, entropy in self._since_step:
            for sample in range(batch.num_samples):
                if not batch.counts[sample]:
                    continue
                self.descent.optimizer.zero_grad()
                part = batch.select([sample]) if self.ranks.data_rank == 0 else None
                self._gradient(part, loss, entropy)
                grads = [p.grad for p in self.module.parameters() if p.grad is not None]
                norm = float(whole(torch.nn.utils.get_total_norm(grads)))
                if not math.isfinite(norm):
                    return f"the gradient of experience {batch.eids[sample]} is not finite"
        return "no single experience's gradient is: only their sum overflows"

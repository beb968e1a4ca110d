"""Settings: how policy and critic are trained, and how a model is loaded and spread for that."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from trireme.config.schema import OptimizerConfig
from trireme.engines.torch.composite import towers
from trireme.engines.torch.vision import seeing
from trireme.trainer import attention, ulysses
from trireme.trainer.compiled import compile_blocks
from trireme.trainer.empty import drop_numbers, empty_model, fill_rows
from trireme.trainer.lora import Adapter, Lora
from trireme.trainer.model import (
    load_model,
    prove_architecture,
)
from trireme.trainer.optim import ScheduledOptimizer
from trireme.trainer.ranks import Ranks, Root, Team, blocks, materialize, shard


@dataclass(frozen=True)
class TrainSettings:
    """The settings of training, made once from a plan, the same for policy and critic."""

    optimizer: OptimizerConfig
    max_token_len: int
    """Tokens that a rank computes at a time."""
    grad_clip: float
    """The norm to which larger gradients are scaled down."""
    total_steps: int | None = None
    """The step at which schedules end."""
    device: str = "cpu"
    """The device of a single process; ranks have their own."""
    dtype: str = "float32"
    lora: Lora | None = None
    gradient_checkpointing: bool = False
    compile: bool = False
    """Whether the blocks are compiled, see trainer/compiled.py."""
    offload: bool = False
    """Whether shards and optimizer are in the CPU's memory; only with ranks."""
    share_prefix: bool = True
    attn_implementation: str = "auto"
    """The implementation of attention: auto, or a `Kernel`."""
    trust_remote_code: bool = False
    seed: int = 0
    """The seed of all random numbers in training."""
    deterministic: bool = False
    """Equal steps give equal bytes, also on a GPU, as far as torch has kernels for that."""
    export_dtype: torch.dtype = torch.float32
    """The dtype of exported weights."""
    peak_tflops: float | None = None
    """The peak TFLOP/s of a rank's device; None: looked up by its name."""
    moves_reference: bool = False
    """Whether the reference model follows the policy; its shards are then float32, in which a small
    move is not rounded away."""
    trains_tower: bool = False
    """Whether the tower of a model that sees is trained."""
    trains_projector: bool = False
    """Whether what turns the tower's features into the language model's is trained."""
    replays_routing: bool = False
    """Whether tokens are computed by the experts that their engine recorded."""

    def load(
        self, path: str | Path, ranks: Ranks | None, *, frozen: bool = False
    ) -> PreTrainedModel:
        """Load a model on its device; if it will be spread over ranks, on the CPU, or without
        weights.

        `frozen`: it is the reference, and its shards have the dtype of the computation if it stays
        as it is.
        """
        trust = self.trust_remote_code
        replays = self.replays_routing and not frozen
        model = None
        # A base that is not trained needs no float32 copy.
        dtype = torch.bfloat16 if self.half and self.lora else torch.float32
        if ranks and (self.lora is None or self.lora.leaves_base_alone):
            model = empty_model(
                path,
                dtype=dtype if self.lora else None,
                trust_remote_code=trust,
                replays=replays,
            )
        if ranks and model is not None:
            prove = partial(prove_architecture, path, trust_remote_code=trust, replays=replays)
            self.team(ranks, model).attempt(prove if ranks.rank == 0 else lambda: None)
        else:
            device = "cpu" if ranks else self.device
            model = load_model(
                path,
                device=device,
                dtype=dtype,
                trust_remote_code=trust,
                replays=replays,
            )
        if self.compile:
            compile_blocks(blocks(model))
        if ranks and frozen and self.half and not self.moves_reference:
            for parameter in model.requires_grad_(False).parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        if ranks and ranks.sequence:
            ulysses.switch(model, ranks.sequence)
        model.requires_grad_(not frozen)
        for name, tensor in towers(model):
            learns = not frozen and isinstance(tensor, nn.Parameter) and self._learns(model, name)
            tensor.requires_grad_(learns)
        return model

    def _learns(self, model: PreTrainedModel, name: str) -> bool:
        """Return whether a weight of a composite's towers is trained. Raises ValueError if one
        should be, and the model sees nothing.
        """
        if not (self.trains_tower or self.trains_projector):
            return False
        projects = name.startswith(tuple(f"{part}." for part in seeing(model).projectors))
        return self.trains_projector if projects else self.trains_tower

    @staticmethod
    def frozen_names(model: PreTrainedModel) -> frozenset[str]:
        """Return the names of tensors that training leaves alone: those of a composite's towers,
        none if a part of them is trained.
        """
        found = dict(towers(model))
        trained = any(tensor.requires_grad for tensor in found.values())
        return frozenset() if trained else frozenset(found)

    def spread(self, model: PreTrainedModel, ranks: Ranks | None, path: str | Path) -> Root:
        """Spread the model over ranks as shards, or leave it whole. If the model has no weights
        yet, each rank reads its rows from the folder at `path`.
        """
        if ranks is None:
            return Root(model)
        empty = drop_numbers(model)
        root = shard(model, ranks.mesh, half=self.half, offload=self.offload)
        if empty:
            materialize(root, "cpu" if self.offload else ranks.device)
            named = model.named_parameters()
            fill_rows({Adapter.plain_name(name): weight for name, weight in named}, path)
        return root

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> ScheduledOptimizer:
        """Make the optimizer of a model's parameters."""
        return ScheduledOptimizer(
            parameters, self.optimizer, self.total_steps, grad_clip=self.grad_clip
        )

    def team(self, ranks: Ranks | None, model: PreTrainedModel) -> Team:
        """Return the ranks that share the computation of a batch by `model`."""
        size, share = self.max_token_len, self.share_prefix
        return Team(ranks, model, max_token_len=size, share_prefix=share)

    def kernel(
        self, path: str | Path, device: torch.device, model: PreTrainedModel
    ) -> attention.Kernel:
        """Choose the attention kernel for the model of a folder. Raises ValueError if the requested
        one cannot run.
        """
        return attention.kernel_for(model, path, self.attn_implementation, device, half=self.half)

    def precision(self, ranks: Ranks | None) -> AbstractContextManager:
        """Return bfloat16 autocast if requested; shards have their own policy."""
        if ranks is None and self.half:
            return torch.autocast(torch.device(self.device).type, torch.bfloat16)
        return nullcontext()

    @property
    def half(self) -> bool:
        """True if the forward pass is in bfloat16. On a CPU plans request float32."""
        return self.dtype == "bfloat16"

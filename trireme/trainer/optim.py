"""Optim: builds the optimizer and its learning-rate schedule, clips the gradient, takes the step.

The weights may be whole or sharded over ranks; a step whose gradient is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trireme.config.schema import OptimizerConfig
from trireme.trainer.ranks import whole

_BOARD = 1 << 28
"""Bytes of parked state that lie together: torch rounds each piece of pinned memory up to a power
of two, and one piece for each tensor would need up to twice the memory."""


def make_optimizer(
    parameters: Iterable[nn.Parameter], settings: OptimizerConfig
) -> torch.optim.Optimizer:
    """Make AdamW (fused, the fastest on a CPU too) or SGD over the trainable parameters."""
    trainable = [p for p in parameters if p.requires_grad]
    if settings.optimizer_type == "sgd":
        return torch.optim.SGD(trainable, lr=settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(
        trainable,
        lr=settings.lr,
        betas=(float(settings.betas[0]), float(settings.betas[1])),
        weight_decay=settings.weight_decay,
        fused=True,
    )


class Schedule:
    """The learning rate by train step: linear warm-up, then constant, half a cosine or a
    line down.
    """

    def __init__(self, settings: OptimizerConfig, total_steps: int | None) -> None:
        """`total_steps` is needed for a relative warm-up, and for a decay."""
        self.kind = settings.warmup_style or settings.lr_scheduler_type
        by_share = settings.lr_warmup_steps < 0 and settings.lr_warmup_steps_ratio > 0
        if total_steps is None and (by_share or self.kind != "constant"):
            key = "lr_warmup_steps_ratio" if by_share else f"lr_scheduler_type: {self.kind}"
            raise ValueError(
                f"algorithm.optimizer.{key} needs the number of train steps: set "
                "trainer.total_steps"
            )
        self.peak = settings.lr
        self.total = total_steps or 0
        self.warmup = settings.lr_warmup_steps
        if self.warmup < 0:
            self.warmup = int(settings.lr_warmup_steps_ratio * self.total)
        self.floor = settings.min_lr_ratio or 0.0

    def lr(self, step: int) -> float:
        """Return the learning rate of train step `step`, counted from 0; the first is not 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        done = min((step - self.warmup) / max(self.total - self.warmup, 1), 1.0)
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.peak * (self.floor + (1 - self.floor) * left)


class ScheduledOptimizer:
    """An optimizer with its schedule and its step count."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        settings: OptimizerConfig,
        total_steps: int | None,
        *,
        grad_clip: float,
    ) -> None:
        self.inner = make_optimizer(parameters, settings)
        self.schedule = Schedule(settings, total_steps)
        self.steps = 0
        self._grad_clip = grad_clip
        self._parked: list[tuple[torch.UntypedStorage, int]] = []
        """Device memory of the parked state, and its size."""
        self._shelf: list[Tensor] = []
        """The CPU's memory for them, kept for the next time."""

    @torch.no_grad()
    def park(self) -> None:
        """Move the state's numbers from the device to memory of the CPU, until they are needed."""
        if self._parked:
            return
        for values in self.inner.state.values():
            for tensor in values.values():
                if isinstance(tensor, Tensor) and tensor.numel() > 1:
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    storage = local.untyped_storage()
                    if storage.resizable():  # memory-mapped files are not
                        self._parked.append((storage, storage.nbytes()))
        for numbers, shelved in self._pieces():
            shelved.copy_(numbers)
        for storage, _ in self._parked:
            storage.resize_(0)

    @torch.no_grad()
    def _unpark(self) -> None:
        for storage, size in self._parked:
            storage.resize_(size)
        for numbers, shelved in self._pieces():
            numbers.copy_(shelved)
        self._parked = []

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes of the parked state on the device piece by piece, each with its place on
        the shelf.
        """
        board, used = 0, 0
        for storage, size in self._parked:
            numbers = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            done = 0
            while done < size:
                if board == len(self._shelf):
                    pin = storage.device.type == "cuda"
                    self._shelf.append(torch.empty(_BOARD, dtype=torch.uint8, pin_memory=pin))
                some = min(size - done, _BOARD - used)
                yield numbers[done : done + some], self._shelf[board][used : used + some]
                done, used = done + some, used + some
                if used == _BOARD:
                    board, used = board + 1, 0

    def step(self) -> tuple[float, float]:
        """Do one step and drop the gradients; returns the gradient's norm and the learning rate.

        Nothing changes if the norm is not finite. A collective if parameters are sharded.
        """
        self._unpark()
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        for parameter in parameters:
            # A missing gradient counts as 0: momentum and weight decay continue.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        total = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        norm, lr = float(total), self.schedule.lr(self.steps)
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, self._grad_clip, total)
            for group in self.inner.param_groups:
                group["lr"] = lr
            self.inner.step()
            self.inner.zero_grad()
            self.steps += 1
        return norm, lr

    def state(self) -> dict[str, Any]:
        """Return the state of optimizer and schedule."""
        self._unpark()
        return {
            "optimizer": self.inner.state_dict(),
            "scheduler": {"last_epoch": self.steps},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; decay rates and the like keep their configured values."""
        self._unpark()
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.inner.param_groups
        ]
        self.inner.load_state_dict(state["optimizer"])
        for group, group_options in zip(self.inner.param_groups, options, strict=True):
            group.update(group_options)
        self.steps = state["scheduler"]["last_epoch"]

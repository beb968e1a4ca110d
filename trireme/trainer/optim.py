"""Optim: which optimizer moves the weights, and how fast at each train step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn


class OptimizerSettings(Protocol):
    """The `algorithm.optimizer` section of the YAML."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        ...

    @property
    def lr_warmup_steps(self) -> int:
        """-1: `lr_warmup_steps_ratio` of the total."""
        ...

    @property
    def lr_warmup_steps_ratio(self) -> float:
        """Share of all steps."""
        ...

    @property
    def min_lr_ratio(self) -> float | None:
        """End of a cosine schedule as a share of `lr`."""
        ...

    @property
    def lr_scheduler_type(self) -> str:
        """constant or cosine."""
        ...

    @property
    def optimizer_type(self) -> str:
        """adam, adamw (both AdamW) or sgd."""
        ...

    @property
    def betas(self) -> Sequence[float]:
        """Adam's two."""
        ...

    @property
    def weight_decay(self) -> float:
        """Decoupled from the gradient."""
        ...


def make_optimizer(
    parameters: Iterable[nn.Parameter], settings: OptimizerSettings
) -> torch.optim.Optimizer:
    """AdamW (fused, which is fastest on a CPU too) or SGD over the trainable parameters."""
    trainable = [p for p in parameters if p.requires_grad]
    if settings.optimizer_type in ("adam", "adamw"):
        return torch.optim.AdamW(
            trainable,
            lr=settings.lr,
            betas=(float(settings.betas[0]), float(settings.betas[1])),
            weight_decay=settings.weight_decay,
            fused=True,
        )
    if settings.optimizer_type == "sgd":
        return torch.optim.SGD(trainable, lr=settings.lr, weight_decay=settings.weight_decay)
    raise ValueError(
        f"algorithm.optimizer.optimizer_type is '{settings.optimizer_type}': expected adam, "
        "adamw or sgd"
    )


class Schedule:
    """Learning rate by train step: linear warm-up, then constant, or half a cosine down."""

    def __init__(self, settings: OptimizerSettings, total_steps: int | None) -> None:
        """`total_steps` is needed for a warm-up that is a share of it, and for a cosine."""
        older = getattr(settings, "warmup_style", None)
        self.kind = older or settings.lr_scheduler_type
        if self.kind not in ("constant", "cosine"):
            raise ValueError(
                f"algorithm.optimizer.lr_scheduler_type is '{self.kind}': expected constant "
                "or cosine"
            )
        by_share = settings.lr_warmup_steps < 0 and settings.lr_warmup_steps_ratio > 0
        if total_steps is None and (by_share or self.kind == "cosine"):
            key = "lr_warmup_steps_ratio" if by_share else "lr_scheduler_type: cosine"
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
        """Learning rate of train step `step`, counted from 0; the first is not 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        done = min((step - self.warmup) / max(self.total - self.warmup, 1), 1.0)
        return self.peak * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)

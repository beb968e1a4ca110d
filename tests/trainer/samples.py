"""Samples for trainer tests: shared prompts, equal rollouts, steps that extend others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trireme.algorithms.recipes import Recipe
from trireme.config.schema import OptimizerConfig
from trireme.experience import EID, Experience
from trireme.trainer.attention import AttentionRows, Rows
from trireme.trainer.backend import Backend
from trireme.trainer.critic import Critic
from trireme.trainer.leader import Leader
from trireme.trainer.learning import TrainState
from trireme.trainer.led import Led
from trireme.trainer.pack import PackedBatch
from trireme.trainer.ranks import Ranks, whole
from trireme.trainer.settings import TrainSettings
from trireme.trainer.step import train_step

VOCABULARY = 90
CRITIC = "critic "
"""How the names of a critic's gradients begin."""


def optimizer_of(**given: Any) -> OptimizerConfig:
    """An optimizer section."""
    defaults = {"lr": 1e-3, "lr_warmup_steps": 0, "min_lr_ratio": 0.1, "betas": [0.9, 0.99]}
    options: dict[str, Any] = defaults | given
    return OptimizerConfig(**options)


def settings(**given: Any) -> TrainSettings:
    """How tests train where they do not say otherwise."""
    options = {"optimizer": optimizer_of(), "max_token_len": 60, "grad_clip": 1.0} | given
    return TrainSettings(**options)


def backend_of(
    path: str | Path,
    ranks: Ranks | None = None,
    *,
    reference: bool = False,
    leader: Leader | None = None,
    **given: Any,
) -> Backend:
    """A backend by the settings that are given."""
    make = Backend if leader is None else partial(Led, leader)
    return make(path, settings(**given), ranks, reference=reference)


def critic_of(path: str | Path, ranks: Ranks | None = None, **given: Any) -> Critic:
    """A critic by the settings that are given."""
    return Critic(path, settings(**given), ranks, clip_range=0.5)


def buckets(layout: PackedBatch) -> tuple[AttentionRows, ...]:
    """The padded rows of a layout for SDPA."""
    assert isinstance(layout.attention, Rows)
    return layout.attention.buckets


def experiences(seed: int = 0) -> list[Experience]:
    """Three tasks: rollouts of a prompt (two of them equal), a chain of steps, and a lone one.

    Advantages, temperatures, masks with holes and old log-probabilities all differ.
    """
    rng = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (n,), generator=rng).tolist()

    rows: list[tuple[EID, list[int], int]] = []
    prompt, shared = ids(9), ids(3)
    replies = [shared + ids(4), shared + ids(7), ids(5)]
    for run, reply in enumerate([*replies, replies[0]]):
        rows.append((EID(0, 0, run), prompt + reply, len(prompt)))
    step = ids(6)
    for number in range(3):
        rows.append((EID(0, 1, 0, number), [*step, *ids(4)], len(step)))
        step = [*rows[-1][1], *ids(2)]
    rows.append((EID(0, 2, 0), ids(30), 11))
    out = []
    for eid, tokens, start in rows:
        n = len(tokens) - start
        out.append(
            Experience(
                tokens,
                prompt_length=start,
                action_mask=torch.rand(n, generator=rng) < 0.8,
                logprobs=-4.5 + torch.randn(n, generator=rng) * 0.3,
                versions=[0] * n,
                advantages=torch.randn(n, generator=rng),
                temperature=0.7 if eid.task == 1 else 1.0,
                eid=eid,
            )
        )
    out[3].mask = out[0].mask.clone()
    return out


def of_groups() -> list[Experience]:
    """The samples with one advantage each, as group-relative ones are: good, bad and neither."""
    samples = experiences()
    for n, e in enumerate(samples):
        e.advantages = e.mask * [1.2, -0.7, 0.0, -1.5][n % 4]
    return samples


def move(backend: Backend, noise: float = 0.05) -> None:
    """Make the trained weights differ from those that were loaded, which a reference keeps."""
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in backend.module.parameters():
            p += noise * torch.randn(p.shape, generator=rng)


def gradients_of(
    backend: Backend,
    recipe: Recipe,
    samples: Sequence[Experience],
    *,
    train_state: TrainState | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The whole gradients that a train step leaves for the optimizers, the critic's as
    CRITIC and their names, and its metrics.
    """
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, prefix: str) -> None:
        for name, p in module.named_parameters():
            if p.grad is not None:
                kept[prefix + name] = whole(p.grad).clone()

    def of_policy() -> dict[str, float]:
        keep(backend.module, "")
        backend.module.zero_grad()
        return {}

    backend.step = of_policy
    if critic := train_state.critic if train_state else None:
        step = critic.optimizer.step

        def of_critic() -> tuple[float, float]:
            keep(critic.model, CRITIC)
            return step()

        critic.optimizer.step = of_critic
    metrics = train_step(backend, recipe, samples, version=0, train_state=train_state, **options)
    return kept, metrics


def first_gradients(backend: Backend) -> dict[str, Tensor]:
    """Filled by the first step of a backend that follows: its gradients, whole."""
    gradients: dict[str, Tensor] = {}
    step = backend.step

    def keep() -> dict[str, float]:
        for name, p in backend.module.named_parameters():
            if p.grad is not None and name not in gradients:
                gradients[name] = whole(p.grad).clone()
        return step()

    backend.step = keep
    return gradients


def gap(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of two gradients, relative to the largest number of its tensor.

    A tensor whose numbers are all below a hundredth of its model's largest is measured by that:
    some, such as the gradient of a key's bias, are 0 but for rounding. So a bound holds whatever
    order a processor adds in; weights after Adam are not bounded, since it divides by the gradient.
    """
    assert set(got) == set(expected)
    largest = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    worst = 0.0
    for model in {name.startswith(CRITIC) for name in expected}:
        names = [name for name in expected if name.startswith(CRITIC) == model]
        floor = max(largest[name] for name in names) / 100
        for name in names:
            difference = (got[name].double() - expected[name].double()).abs().max()
            worst = max(worst, float(difference) / max(largest[name], floor))
    return worst


def apart(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float = 1e-5) -> float:
    """The share of the weights that differ by more than `within`, after Adam's steps.

    Where a gradient is nearly 0 Adam moves by what rounding made of it, so that each processor has
    a few of its own; a wrong gradient moves them all.
    """
    assert set(got) == set(expected)
    far = sum(int(((got[n] - w).abs() > within).sum()) for n, w in expected.items())
    return far / sum(w.numel() for w in expected.values())

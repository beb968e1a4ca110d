"""Train steps on a device that is not the CPU, without one: what lies where, and the waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.fake_gpu import DEVICE, FakeGpu, put
from tests.trainer.samples import backend_of, critic_of, experiences, gradients_of, move
from tests.trainer.test_every_algorithm import MIXES, _samples
from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.config.memory import LOGIT_NUMBERS, STORED_LOGITS
from trireme.registry import ALGORITHMS
from trireme.trainer.backend import Backend
from trireme.trainer.learning import TrainState

PARTS: list[dict[str, Any]] = [
    {"algorithm_type": name} for name in ALGORITHMS.built_in() if name != "grpo_verl"
]
PARTS += [{"algorithm_type": "grpo", **given} for given in MIXES]


@contextmanager
def device() -> Iterator[FakeGpu]:
    """The double, in place of a GPU."""
    with (
        FakeGpu() as gpu,
        patch.dict(LOGIT_NUMBERS, {DEVICE.type: 2**12}),
        patch.dict(STORED_LOGITS, {DEVICE.type: 2**11}),
        patch.object(torch, "is_autocast_enabled", lambda _=None: False),
    ):
        yield gpu


def moved(one: Any, *models: Any) -> None:
    """A backend's or a critic's models are on the double from now on."""
    for model in models:
        put(model)
    one.device = DEVICE
    with patch(
        "trireme.trainer.optim.torch.optim.AdamW", lambda p, fused, **g: plain_adamw(p, **g)
    ):
        one.optimizer = one._settings.make_optimizer(models[0].parameters())


def plain_adamw(parameters: Any, **given: Any) -> torch.optim.Optimizer:
    return adamw(parameters, foreach=False, **given)


adamw = torch.optim.AdamW


def learned(
    folder: Path, recipe: Recipe, *, on_device: bool, length: int = 40
) -> tuple[dict[str, Any], dict[str, float]]:
    """Gradients of a step, and its metrics."""
    backend = backend_of(folder, reference=recipe.needs_reference, max_token_len=length)
    move(backend, 0.05)
    critic = critic_of(folder, max_token_len=length) if recipe.needs_critic else None
    if on_device:
        reference = [backend._reference.model] if backend._reference else []
        moved(backend, backend.module, *reference)
        if critic is not None:
            moved(critic, critic.model)
    kept, metrics = gradients_of(
        backend, recipe, _samples(recipe), train_state=TrainState(recipe, critic)
    )
    return {name: tensor.cpu() for name, tensor in kept.items()}, metrics


@pytest.mark.parametrize("given", PARTS, ids=lambda given: "-".join(map(str, given.values())))
def test_a_step_of_every_algorithm_keeps_the_device_and_the_cpu_apart(
    given: dict[str, Any], tiny_dir: Path
) -> None:
    recipe = get_recipe(SimpleNamespace(**given))
    with device():
        got, found = learned(tiny_dir, recipe, on_device=True)
    assert sum(float(g.abs().sum()) for g in got.values()) > 0
    if list(given.values()) not in (["grpo"], ["ppo"], ["dpo"]):
        return  # their numbers are those of a CPU as well, in the same operators
    expected, metrics = learned(tiny_dir, recipe, on_device=False)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4)
    for name in metrics:
        if not name.startswith(("time/", "perf/")):
            assert found[name] == pytest.approx(metrics[name], abs=1e-4), name


def test_a_step_waits_for_the_device_a_few_times_a_micro_batch(tiny_dir: Path) -> None:
    """Not by tokens, nor by layers: each wait leaves a GPU without work."""
    recipe = get_recipe(SimpleNamespace(algorithm_type="grpo"))
    waits = []
    for length in (10_000, 30):
        with device() as gpu:
            backend: Backend = backend_of(tiny_dir, reference=True, max_token_len=length)
            moved(backend, backend.module, backend._reference.model)  # type: ignore[union-attr]
            gradients_of(backend, recipe, experiences())
            waits.append((gpu.waits.total(), backend._micro_batches))
    (few, one), (most, several) = waits
    assert one == 1 and several == 3
    assert (most - few) / (several - one) <= 8 and few <= 32

"""Critic: its loss, what it learns, and that it goes on where it was saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.trainer.samples import backend_of, critic_of, experiences, optimizer_of, settings
from trireme.algorithms.recipes import get_recipe
from trireme.batch import flatten
from trireme.checkpoint.layout import WEIGHTS
from trireme.checkpoint.save import write_weights
from trireme.config.schema import AlgorithmConfig, CriticConfig
from trireme.launch import models
from trireme.trainer.critic import HEAD, Critic, value_loss
from trireme.trainer.learning import TrainState
from trireme.trainer.step import train_step


def _critic(path, **given) -> Critic:
    return critic_of(path, **given)


def test_the_value_loss_is_the_larger_of_plain_and_clipped():
    values = torch.tensor([1.0, 3.0, 3.0])
    old, returns = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2.0, 4.0, 1.0])
    loss, clipped = value_loss(values, old, returns, clip_range=0.5)
    # moved 0; moved 2 towards 4 and held at 1.5; moved 2 away from 1: the plain one is larger
    assert loss.tolist() == pytest.approx([0.5, 2.5**2 / 2, 2])
    assert clipped.tolist() == [False, True, False]


def test_values_begin_at_0_and_learn_the_returns(tiny_dir):
    critic = _critic(tiny_dir)
    batch = flatten(experiences())
    assert not critic.values(batch).any()
    returns = (batch.targets % 7).float()
    errors = []
    for _ in range(60):
        now = batch.with_fields(values=critic.values(batch), returns=returns)
        errors.append(critic.update(now)["critic/value_loss"])
    assert errors[-1] < 0.5 * errors[0]


def test_a_value_is_read_where_the_policy_stands(tiny_dir):
    critic = _critic(tiny_dir)
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-1, 1, critic.head.weight.numel()))
    samples = experiences()
    batch = flatten(samples)
    expected = []
    for e in samples:
        with torch.no_grad():
            hidden = critic.model.base_model(
                input_ids=e.tokens[None], use_cache=False, packed=_alone(e)
            ).last_hidden_state[0]
            worth = hidden @ critic.head.weight[0]
        expected += worth[e.mask.nonzero().squeeze(1) - 1].tolist()
    torch.testing.assert_close(critic.values(batch), torch.tensor(expected), atol=1e-5, rtol=1e-4)


def _alone(e):
    from trireme.batch import of_tokens
    from trireme.trainer.pack import pack

    # one more token, so that the layout holds all of this sample's
    return pack(of_tokens([[*e.tokens.tolist(), 3]]))


def test_a_saved_critic_goes_on_with_the_same_bytes(tiny_dir, tmp_path):
    recipe = get_recipe(SimpleNamespace(algorithm_type="ppo", kl_loss_fn="none"))
    samples = experiences()
    for n, e in enumerate(samples):
        e.reward = float(n % 2)
    batch = flatten(samples)
    first = _critic(tiny_dir)
    targets = {"returns": torch.ones(batch.num_tokens)}
    for _ in range(2):
        first.update(batch.with_fields(values=first.values(batch), **targets))
    second = _critic(tiny_dir)
    first.save(tmp_path)
    second.load(tmp_path)
    for critic in (first, second):
        critic.update(batch.with_fields(values=critic.values(batch), **targets))
    for name, tensor in first.weights().items():
        assert torch.equal(tensor, second.weights()[name]), name
    assert first.optimizer.steps == second.optimizer.steps == 3
    write_weights(tmp_path / WEIGHTS, {k: v for k, v in first.weights().items() if HEAD not in k})
    with pytest.raises(
        ValueError, match=r"belongs to another model: 1 tensors differ, value_head\.weight"
    ):
        second.load(tmp_path)
    with pytest.raises(ValueError, match="has no critic, which this algorithm needs"):
        second.load(tmp_path / "critic")
    assert recipe.needs_critic


def test_the_policy_stays_while_the_critic_warms_up(tiny_dir):
    adaptive = {"adaptive": True, "target_kl": 0.1, "kl_coef": 0.5}
    recipe = get_recipe(
        SimpleNamespace(algorithm_type="ppo", kl_loss_fn="k2", kl_loss_fn_args=adaptive)
    )
    samples = experiences()
    for n, e in enumerate(samples):
        e.reward = float(n % 2)
    backend = backend_of(tiny_dir, reference=True)
    train_state = TrainState(recipe, _critic(tiny_dir), critic_warmup=1)
    before = {name: w.clone() for name, w in backend.weights().items()}
    metrics = train_step(backend, recipe, samples, version=0, train_state=train_state)
    assert metrics["critic/grad_norm"] > 0 and backend.optimizer.steps == 0
    assert train_state.coefficients["kl_loss_fn"] == 0.5  # no divergence was measured
    assert all(torch.equal(w, before[n]) for n, w in backend.weights().items())
    train_step(backend, recipe, samples, version=0, train_state=train_state)
    assert backend.optimizer.steps == 1 and train_state.steps == 2


def test_the_policys_schedule_ends_with_the_run_though_the_critic_warms_up_first(tiny_dir) -> None:
    """8 train steps of 2 optimizer steps each, in the first 3 of which the critic alone learns."""
    cosine = optimizer_of(lr=1.0, lr_scheduler_type="cosine", min_lr_ratio=0.0)
    critic = CriticConfig(optimizer=cosine, warmup_steps=3)
    algorithm = AlgorithmConfig(algorithm_type="ppo", critic=critic, num_iterations=2)
    config = SimpleNamespace(algorithm=algorithm, model=SimpleNamespace(critic_model_path=None))
    plan: Any = SimpleNamespace(config=config, device="cpu", deterministic=False)
    given = settings(optimizer=cosine, total_steps=16)
    with patch.object(models, "_settings", return_value=given):
        made = models.make_models(plan, str(tiny_dir), get_recipe(algorithm))
    assert made.train_state.critic is not None
    schedules = made.backend.optimizer.schedule, made.train_state.critic.optimizer.schedule
    assert [schedule.total for schedule in schedules] == [10, 16]
    assert [schedule.lr(schedule.total) for schedule in schedules] == [0.0, 0.0]

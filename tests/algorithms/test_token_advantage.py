"""Token advantages against hand-worked numbers and a plain float64 recursion."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.algorithms.token_advantage import (
    gae,
    on_policy_distill,
    reinforceplusplus,
    whiten,
)

IDS = torch.tensor([0, 0, 0, 2, 2])  # sample 1 has no trained token
REWARDS = torch.tensor([0.0, 0.0, 1.0, 0.5, 2.0])
VALUES = torch.tensor([0.2, 0.4, 0.6, 1.0, 1.5])


def _gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """By the definition: a sum over all later temporal differences."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_is_the_sum_of_discounted_differences_sample_by_sample(gamma, lam):
    advantages, returns = gae(REWARDS, VALUES, IDS, gamma=gamma, lam=lam)
    plain = _gae([0, 0, 1], [0.2, 0.4, 0.6], gamma, lam) + _gae([0.5, 2], [1, 1.5], gamma, lam)
    expected = torch.tensor(plain)
    torch.testing.assert_close(returns, expected + VALUES)
    torch.testing.assert_close(advantages, whiten(expected))


def test_gae_at_gamma_and_lambda_1_returns_the_rewards_to_go():
    _, returns = gae(REWARDS, VALUES, IDS)
    assert returns.tolist() == pytest.approx([1, 1, 1, 2.5, 2])


def test_reinforceplusplus_whitens_the_discounted_returns():
    advantages, returns = reinforceplusplus(REWARDS, IDS, gamma=0.5)
    assert returns.tolist() == pytest.approx([0.25, 0.5, 1, 1.5, 2])
    # mean 1.05, squared deviations .64 .3025 .0025 .2025 .9025: variance 2.05 / 4
    assert advantages.tolist() == pytest.approx(
        [x / math.sqrt(0.5125) for x in (-0.8, -0.55, -0.05, 0.45, 0.95)], abs=1e-5
    )


def test_whitening_has_mean_0_and_std_1_and_a_lone_value_is_0():
    values = torch.tensor([1.0, 2.0, 6.0])
    out = whiten(values)
    assert (float(out.mean()), float(out.std())) == pytest.approx((0, 1), abs=1e-6)
    assert whiten(torch.tensor([3.0])).item() == 0


@pytest.mark.parametrize("value", [0.1, 3.3, 100.1])
@pytest.mark.parametrize("count", [7, 1000, 54321])
def test_whitened_equal_values_are_0(value, count):
    """Their mean in float32 is off by a rounding, which the small spread would multiply by 1e4."""
    assert not whiten(torch.full((count,), value)).any()


TEACHER, STUDENT = torch.tensor([0.5]).log(), torch.tensor([0.2]).log()


def test_distillation_rewards_what_the_teacher_finds_likelier():
    out = on_policy_distill(TEACHER, STUDENT, kl_coef=2.0)
    assert out.item() == pytest.approx(2 * math.log(2.5))

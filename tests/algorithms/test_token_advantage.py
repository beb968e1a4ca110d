"""Token advantages against hand-worked numbers and a plain float64 recursion."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.algorithms.token_advantage import (
    gae,
    jsd,
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


TEACHER, STUDENT = torch.tensor([0.5]).log(), torch.tensor([0.2]).log()


def test_distillation_rewards_what_the_teacher_finds_likelier():
    out = on_policy_distill(TEACHER, STUDENT, kl_coef=2.0)
    assert out.item() == pytest.approx(2 * math.log(2.5))


@pytest.mark.parametrize("b", [0.0, 0.25, 0.5, 1.0])
def test_jsd_follows_the_gradient_of_the_divergence_on_the_students_own_samples(b):
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    p = torch.tensor([0.1, 0.6, 0.25, 0.05], dtype=torch.float64)
    q = logits.softmax(0)
    middle = b * p + (1 - b) * q
    if b in (0, 1):
        divergence = (p * (p / q).log()).sum() if b else (q * (q / p).log()).sum()
    else:
        to_middle = [(each * (each / middle).log()).sum() for each in (p, q)]
        divergence = b * to_middle[0] + (1 - b) * to_middle[1]
    expected = torch.autograd.grad(-divergence, logits, retain_graph=True)
    advantages = jsd(p.log(), q.detach().log(), lambda_coef=b)
    gained = (q.detach() * advantages * q.log()).sum()  # each token as often as it is sampled
    torch.testing.assert_close(torch.autograd.grad(gained, logits), expected)


def test_jsd_in_chunks_is_the_same():
    student, teacher = torch.linspace(-3, -0.1, 7), torch.linspace(-1, -2, 7)
    whole = jsd(teacher, student, temperature=2.0)
    assert torch.equal(jsd(teacher, student, temperature=2.0, chunk_size=3), whole)
    # student 0.25 and teacher 0.64 at temperature 2: square roots, mixture 0.65
    pair = jsd(torch.tensor([0.64]).log(), torch.tensor([0.25]).log(), temperature=2.0)
    expected = math.log(0.65 / 0.5) / 2
    assert pair.item() == pytest.approx(expected, abs=1e-6)


def test_jsd_refuses_a_weight_outside_0_to_1():
    with pytest.raises(ValueError, match="expected 0 to 1"):
        jsd(TEACHER, STUDENT, lambda_coef=1.5)

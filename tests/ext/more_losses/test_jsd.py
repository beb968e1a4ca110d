"""JSD against the gradient of the divergence and hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.test_token_advantage import STUDENT, TEACHER
from trireme.ext.more_losses.token_advantages import jsd


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

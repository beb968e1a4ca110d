"""The entropy clip against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.ext.more_losses.token_advantages import clipb, clipv

# p = 1/2, H = log 2: S = 0. p = 1/8, H = log 2: S = (log 2 - 3 log 2) / 8 = -log(2) / 4.
LOGPROBS = torch.tensor([0.5, 0.5, 0.5, 0.125]).log()
ENTROPIES = torch.full((4,), math.log(2))
# S / log 2 is 0 0 0 -1/4: mean -1/16, std sqrt(3)/16; the last lies sqrt(3) std below the mean.


@pytest.mark.parametrize(("mu", "last"), [(1.7, 0.0), (1.8, -1.0)])
def test_a_punished_token_far_below_the_mean_is_left_out(mu, last):
    advantages = torch.tensor([-1.0, 1.0, -2.0, -1.0])
    assert clipb(advantages, LOGPROBS, ENTROPIES, mu=mu).tolist() == [-1, 1, -2, last]


def test_what_is_rewarded_stays():
    advantages = torch.ones(4)
    assert clipb(advantages, LOGPROBS, ENTROPIES, mu=0.1).tolist() == [1, 1, 1, 1]


def test_tokens_that_are_all_alike_stay():
    advantages = -torch.ones(4)
    same = LOGPROBS[:1].expand(4)
    assert clipb(advantages, same, ENTROPIES, mu=0.0).tolist() == [-1, -1, -1, -1]


def test_the_sign_is_that_of_the_entropys_change():
    """Pushing the clipped token down lowers the entropy, pushing a likely one down raises it."""
    logits = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)

    def entropy(values: torch.Tensor) -> float:
        p = values.softmax(0)
        return float(-(p * p.log()).sum())

    now, p = entropy(logits), logits.softmax(0)
    for token in range(3):
        down = logits.clone()
        down[token] -= 1e-6
        discriminator = float(p[token] * (now + p[token].log()))
        assert (entropy(down) - now) / 1e-6 == pytest.approx(discriminator, abs=1e-5)


@pytest.mark.parametrize(
    ("mu", "max_frac", "expected"),
    [
        (1.1, 1.0, [-1, 2, 0, 0]),  # -S / log 2 + E is 0 0 1/4 1/2 (A > 0 stays), std 0.2073
        (1.1, 0.5, [-1, 2, 0, 0]),  # of four tokens two
        (1.1, 0.01, [-1, 2, -1, 0]),  # one: the lowest
        (2.0, 1.0, [-1, 2, -1, 0]),
        (2.5, 1.0, [-1, 2, -1, -1]),
    ],
)
def test_clipv_compares_with_the_vocabularys_mean(mu, max_frac, expected):
    """S / log 2 of p = 1/2, 1/2, 1/8, 1/8 at H = log 2 is 0 0 -1/4 -1/4; the last has E 1/4."""
    logprobs = torch.tensor([0.5, 0.5, 0.125, 0.125]).log()
    means = math.log(2) * torch.tensor([0.0, 0.0, 0.0, 0.25])
    advantages = torch.tensor([-1.0, 2.0, -1.0, -1.0])
    got = clipv(advantages, logprobs, ENTROPIES, means, mu=mu, max_frac=max_frac)
    assert got.tolist() == expected and advantages.tolist() == [-1, 2, -1, -1]


def test_a_step_along_a_tokens_gradient_changes_the_entropy_by_what_clipv_looks_at():
    """Logits moved by e (1_k - p) change the entropy by -e (S - E[S]), to first order."""
    logits = torch.tensor([2.0, 0.0, -1.0, 0.5], dtype=torch.float64)
    p = logits.softmax(0)
    now = -(p * p.log()).sum()
    s = p * (now + p.log())
    for token in range(4):
        step = -p.clone()
        step[token] += 1
        moved = (logits + 1e-6 * step).softmax(0)
        change = (-(moved * moved.log()).sum() - now) / 1e-6
        assert float(change) == pytest.approx(-float(s[token] - (p * s).sum()), abs=1e-5)

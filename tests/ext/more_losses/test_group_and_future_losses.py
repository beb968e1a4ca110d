"""REAL, FIPO, RLSD and SDAR, against loops in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trireme.ext.more_losses.losses import discounted_ahead, fipo, sdar
from trireme.ext.more_losses.sequence_losses import label_weights, real
from trireme.ext.more_losses.token_advantages import rlsd

SAMPLES = torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 4, 5])
POSITIONS = torch.tensor([4, 5, 9, 3, 4, 5, 8, 2, 3, 4, 7, 6])
"""Samples 0 and 4 have tokens between the trained ones that an environment wrote."""
GROUPS = torch.tensor([7, 7, 7, 9, 9, 9])
"""Of samples 0 to 5."""
PER_GROUP = torch.tensor(3.0)


def _draw(seed: int, spread: float = 0.6) -> tuple[Tensor, Tensor]:
    """New and old log-probabilities."""
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(len(SAMPLES), generator=rng, dtype=torch.float64) * 3
    noise = torch.randn(len(SAMPLES), generator=rng, dtype=torch.float64)
    return (old + spread * noise).requires_grad_(), old


def _real_loss(logprobs: Tensor, old: Tensor, right: list[bool], tau: float) -> Tensor:
    """The formula of the paper, a group at a time; the mean over groups."""
    s = [(logprobs - old)[sample == SAMPLES].mean() for sample in range(6)]
    total = torch.zeros((), dtype=torch.float64)
    for group in (7, 9):
        members = [k for k in range(6) if GROUPS[k] == group]
        good, bad = [k for k in members if right[k]], [k for k in members if not right[k]]
        if good and bad:
            total = total + torch.stack([-s[k] / tau for k in good]).exp().sum().log1p()
            total = total + torch.stack([s[k] / tau for k in bad]).exp().sum().log1p()
    return total / 2


@pytest.mark.parametrize(
    "right",
    [[True, False, False, True, True, False], [True, True, True, False, True, False]],
    ids=["both groups", "one group alone has both"],
)
def test_real_has_the_gradient_of_its_formula(right: list[bool]) -> None:
    logprobs, old = _draw(0)
    advantages = torch.tensor([1.5 if r else -0.25 for r in right], dtype=torch.float64)[SAMPLES]
    batch = logprobs.detach(), old, advantages, SAMPLES, GROUPS[SAMPLES], PER_GROUP
    factors = label_weights(*batch, tau=0.4)
    loss, _ = real(logprobs, old, tau=0.4)
    counts = torch.bincount(SAMPLES)[SAMPLES]
    (loss * factors / (6 * counts)).sum().backward()  # seq-mean-token-mean
    [expected] = torch.autograd.grad(_real_loss(logprobs, old, right, 0.4), logprobs)
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, expected, atol=1e-14)
    assert expected.abs().max() > 0.05


def test_a_rollout_of_real_with_an_advantage_of_0_is_a_wrong_one() -> None:
    logprobs, old = _draw(1)
    advantages = torch.tensor([0.5, 0.0, -0.5, 0.0, 0.0, 0.0], dtype=torch.float64)[SAMPLES]
    batch = logprobs.detach(), old, advantages, SAMPLES, GROUPS[SAMPLES], PER_GROUP
    factors = label_weights(*batch)
    assert (factors[SAMPLES == 0] < 0).all() and (factors[SAMPLES == 1] > 0).all()
    assert (factors[SAMPLES >= 3] == 0).all()  # nobody was right there


def _fipo_loss(logprobs: Tensor, old: Tensor, a: Tensor, **given: float | bool | None) -> Tensor:
    """Token by token, every sum written out; the influence has no gradient."""
    total = torch.zeros((), dtype=torch.float64)
    bound, gamma = given["bound"], 2 ** (-1 / 8)
    for m in range(len(SAMPLES)):
        ahead = 0.0
        for k in range(m, len(SAMPLES)):
            log_r = float((logprobs - old)[k].detach())
            if SAMPLES[k] == SAMPLES[m] and (bound is None or math.exp(log_r) <= bound):
                ahead += gamma ** int(POSITIONS[k] - POSITIONS[m]) * log_r
        weight = math.exp(ahead)
        least = 1.0 if given["high_only"] else 0.8
        weight = min(max(weight, least), 1.2)
        ratio = (logprobs[m] - old[m]).exp()
        if a[m] < 0 and ratio > 1.5:
            weight = min(max(weight, 0.8), 1.0)
        loss = torch.maximum(-a[m] * ratio, -a[m] * ratio.clamp(0.8, 1.28))
        if a[m] < 0 and bound is not None:
            loss = torch.minimum(loss, -a[m] * bound)
        total = total + weight * loss
    return total


@pytest.mark.parametrize("high_only", [True, False])
@pytest.mark.parametrize("bound", [None, 2.0])
@pytest.mark.parametrize("spread", [0.6, 0.03])  # with the smaller one few are at a bound
def test_fipo_is_the_loop_over_what_follows(
    spread: float, bound: float | None, high_only: bool
) -> None:
    logprobs, old = _draw(2, spread)
    advantages = torch.tensor([1.0, -1.0, -0.5, 2.0, -2.0, 0.0], dtype=torch.float64)[SAMPLES]
    loss, reported = fipo(
        *(logprobs, old, advantages, SAMPLES, POSITIONS),
        clip_range_high=0.28,
        clip_ratio_c=bound,
        half_life=8.0,
        influence_clip_high_only=high_only,
        safety_threshold=1.5,
    )
    expected = _fipo_loss(logprobs, old, advantages, bound=bound, high_only=high_only)
    assert loss.sum().item() == pytest.approx(expected.item(), abs=1e-12)
    [slope] = torch.autograd.grad(loss.sum(), logprobs)
    assert torch.allclose(slope, torch.autograd.grad(expected, logprobs)[0], atol=1e-12)
    assert len(reported["influence"].unique()) > 2


def test_sums_ahead_stay_within_their_sample() -> None:
    ones = torch.ones(7, dtype=torch.float64)
    samples, positions = torch.tensor([0] * 5 + [1] * 2), torch.tensor([1, 2, 3, 4, 6, 1, 2])
    found = discounted_ahead(ones, samples, positions, 0.5)
    # from behind: 1, 1 + 1/4, 1 + 5/8, ...
    assert found.tolist() == [1.90625, 1.8125, 1.625, 1.25, 1.0, 1.5, 1.0]
    empty = torch.zeros(0, dtype=torch.long)
    assert len(discounted_ahead(ones[:0], empty, empty, 0.5)) == 0


def test_rlsd_by_hand() -> None:
    advantages = torch.tensor([2.0, 2.0, -1.0, -1.0, 0.0], dtype=torch.float64)
    gaps = torch.tensor([0.1, -3.0, 0.1, -3.0, 1.0], dtype=torch.float64)
    old = torch.full((5,), -1.0, dtype=torch.float64)

    def at(step: int, **options: Any) -> list[float]:
        given: dict[str, Any] = {"lam": 0.5, "weight_clip": 0.2, **options}
        return rlsd(advantages, old + gaps, old, torch.tensor(step), **given).tolist()

    up, down = math.exp(0.1), math.exp(-0.1)
    whole = [1 + up, 1 + 0.8, -0.5 - 0.5 * down, -0.5 - 0.6, 0.0]
    assert at(0) == pytest.approx(whole, abs=1e-12)
    assert at(9) == at(0)
    assert at(0, negative_only=True) == pytest.approx([2, 2, *whole[2:]], abs=1e-12)
    # half way up the warm-up lam is 0.25; three quarters down the decay, 0.125
    assert at(2, lam_warmup_steps=4)[1] == pytest.approx(2 * (0.75 + 0.25 * 0.8), abs=1e-12)
    falling = at(7, lam_warmup_steps=4, lam_decay_steps=4)[1]
    assert falling == pytest.approx(2 * (0.875 + 0.125 * 0.8), abs=1e-12)
    assert at(50, lam_decay_steps=4) == advantages.tolist()


def test_sdar_is_a_gate_without_a_gradient_times_the_gap() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-1.5, -0.5], dtype=torch.float64)
    loss = sdar(logprobs, teacher, gate_beta=2.0)
    gates = [1 / (1 + math.exp(1.0)), 1 / (1 + math.exp(-3.0))]
    assert loss.tolist() == pytest.approx([-0.5 * gates[0], 1.5 * gates[1]], abs=1e-12)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-gates[0], -gates[1]], abs=1e-12)

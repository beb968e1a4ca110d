"""Policy losses, KL, entropy and reduction against hand-worked numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trireme.algorithms import kl
from trireme.algorithms.policy_loss import ppo, sft

LN2 = math.log(2)


def _ppo(ratio: float, advantage: float, **options: Any) -> float:
    old = torch.tensor([-1.0], dtype=torch.float64)
    loss, _ = ppo(old + math.log(ratio), old, torch.tensor([advantage]), **options)
    return loss.item()


def test_ppo_is_minus_advantage_times_ratio_inside_the_clip():
    assert _ppo(1.1, 2.0) == pytest.approx(-2.2)


def test_ppo_stops_gaining_above_one_plus_high():
    assert _ppo(2.0, 1.0, clip_range_high=0.28) == pytest.approx(-1.28)


def test_ppo_stops_gaining_below_one_minus_low():
    assert _ppo(0.5, -1.0, clip_range_low=0.3) == pytest.approx(0.7)


def test_ppo_keeps_the_worse_side_unclipped():
    assert _ppo(0.5, 1.0) == pytest.approx(-0.5)
    assert _ppo(2.0, -1.0) == pytest.approx(2.0)


def test_ppo_bounds_the_loss_of_a_large_ratio_with_negative_advantage():
    assert _ppo(8.0, -1.0) == pytest.approx(3.0)
    assert _ppo(8.0, -1.0, clip_ratio_c=5.0) == pytest.approx(5.0)


def test_ppo_survives_a_ratio_that_overflows():
    old = torch.tensor([-500.0])
    loss, _ = ppo(torch.tensor([0.0]), old, torch.tensor([1.0]))
    assert torch.isfinite(loss).all()


def test_ppo_reports_which_tokens_were_clipped():
    old = torch.zeros(4, dtype=torch.float64)
    new = torch.tensor([1.1, 2.0, 8.0, 0.5]).double().log()
    _, reported = ppo(new, old, torch.tensor([1.0, 1.0, -1.0, -1.0]))
    assert reported["pg_clipfrac"].tolist() == [0, 1, 0, 1]
    assert reported["pg_clipfrac_lower"].tolist() == [0, 0, 1, 0]


def test_ppo_refuses_a_dual_clip_below_one():
    with pytest.raises(ValueError, match="clip_ratio_c"):
        _ppo(1.0, 1.0, clip_ratio_c=0.5)


def test_sft_is_the_negative_log_probability():
    assert sft(torch.tensor([-1.5, 0.0])).tolist() == [1.5, 0.0]


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (kl.k1, LN2),
        (kl.absolute, LN2),
        (kl.k2, LN2**2 / 2),
        (kl.k3, 0.5 - 1 + LN2),
        (kl.low_var_kl, 0.5 - 1 + LN2),
    ],
)
def test_kl_of_a_token_twice_as_likely_as_in_the_reference(estimate, expected):
    assert estimate(torch.tensor([LN2]), torch.tensor([0.0])).item() == pytest.approx(expected)


def test_low_var_kl_is_bounded():
    assert kl.low_var_kl(torch.tensor([-50.0]), torch.tensor([0.0])).item() == 10


SAMPLE_IDS = torch.tensor([0, 0, 0, 2])  # sample 1 has no trained token
LOSS = torch.tensor([1.0, 2.0, 3.0, 8.0])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 14 / 4),
        ("seq-mean-token-sum", (6 + 0 + 8) / 3),
        ("seq-mean-token-mean", (2 + 0 + 8) / 3),
        ("seq-mean-token-sum-norm", 14 / 5),
    ],
)
def test_reduction_by_mode(mode, expected):
    weights = kl.weights(mode, SAMPLE_IDS, 3, width=5)
    assert (weights * LOSS).sum().item() == pytest.approx(expected)


def test_reduction_refuses_an_unknown_mode():
    with pytest.raises(ValueError, match="token-mean"):
        kl.weights("mean", SAMPLE_IDS, 3, width=5)


def test_of_no_tokens_there_are_no_sums():
    nothing, ids = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert kl.segment_sum(nothing, ids).shape == (0,)

"""Baselines of the extension against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.test_baseline import GROUPS, REWARDS
from trireme.algorithms.advantage import rloo
from trireme.ext.more_losses.advantages import asymre, opmd, raft, rec


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (opmd, {}, [-2, -1, 3, 4]),
        (asymre, {}, [-1.9, -0.9, 3.1, 4]),
        (asymre, {"baseline_shift": 0.5}, [-2.5, -1.5, 2.5, 4]),
        (rec, {}, [-2, -1, 3, 0]),
        (rec, {"std_normalize": True}, [x / math.sqrt(14 / 3) for x in (-2, -1, 3)] + [0]),
    ],
)
def test_a_baseline_is_taken_off(function, options, expected):
    out = function(REWARDS, GROUPS, **options)
    assert out.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("size", [3, 6, 7, 8])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7])
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (rloo, {}),
        (opmd, {}),
        (asymre, {"baseline_shift": 0.0}),
        (rec, {"std_normalize": True}),
        (rec, {"std_normalize": True, "drop": "balance"}),
    ],
)
def test_equal_rewards_teach_nothing(function, options, reward, size):
    """Whether float32 has their mean exactly, or not; `rec` divides by their spread."""
    out = function(torch.full((size,), reward), torch.zeros(size), **options)
    assert out.tolist() == [0.0] * size


def test_opmds_soft_baseline_is_the_log_of_the_mean_exponential():
    soft = 2 * math.log((1 + math.exp(0.5) + math.exp(2.5)) / 3)
    out = opmd(REWARDS, GROUPS, opmd_baseline="logavgexp", tau=2.0)
    assert out.tolist() == pytest.approx([-soft, 1 - soft, 5 - soft, 4], abs=1e-5)


def test_opmd_refuses_an_unknown_baseline():
    with pytest.raises(ValueError, match="'mean' or 'logavgexp'"):
        opmd(REWARDS, GROUPS, opmd_baseline="median")  # pyright: ignore


def test_rec_balances_the_two_sides_of_the_mean():
    rewards = torch.tensor([0.0, 0.0, 0.0, 4.0])
    out = rec(rewards, torch.zeros(4), drop="balance")
    assert sorted(out.tolist()) == [-2, 0, 0, 2]  # one of three stays: the mean is 2
    normed = rec(rewards, torch.zeros(4), drop="balance", std_normalize=True)
    assert sorted(normed.tolist()) == pytest.approx([-1, 0, 0, 1], abs=1e-5)
    even = rec(torch.tensor([0.0, 1.0, 2.0]), torch.zeros(3), drop="balance")
    assert even.tolist() == [-1, 0, 1]  # the mean itself is not below it: nothing is dropped
    with pytest.raises(ValueError, match="'balance'"):
        rec(rewards, torch.zeros(4), drop="half")  # pyright: ignore


def test_raft_keeps_the_best_of_a_group_if_it_is_good():
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0])
    out = raft(rewards, torch.tensor([0, 0, 0, 1, 1]))
    assert out.isnan().tolist() == [True, False, False, True, True]
    assert out[1:3].tolist() == [1, 1]
    assert not raft(rewards, torch.tensor([0, 0, 0, 1, 1]), min_reward=-1.0)[3:].isnan().any()

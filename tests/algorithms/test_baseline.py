"""Baselines against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.algorithms.advantage import asymre, dapo, grpo, opmd, raft, rec, reinforce, remax, rloo

REWARDS = torch.tensor([0.0, 1.0, 5.0, 4.0])
GROUPS = torch.tensor([0, 0, 0, 1])  # mean 2 of the first; the second is alone


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (rloo, {}, [-3, -1.5, 4.5, 4]),  # against the mean of the two others
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


def test_reinforce_is_the_reward():
    assert reinforce(REWARDS).tolist() == REWARDS.tolist()


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


def test_a_run_of_several_experiences_counts_once_in_the_baseline():
    split = rloo(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3), torch.tensor([0, 1, 1]))
    assert split.tolist() == [1, -1, -1]


def test_remax_compares_with_the_greedy_run():
    out = remax(REWARDS, GROUPS, torch.tensor([1, 0, 2, 3]))
    assert out[:3].tolist() == [-1, 0, 4]
    assert out[3].isnan()  # its group's greedy run has failed
    # of a greedy run of two steps, the last step's reward is the baseline, and neither is trained
    steps = remax(torch.tensor([0.5, 1.0, 3.0]), torch.zeros(3), torch.tensor([0, 0, 1]))
    assert steps.tolist() == [0, 0, 2]


def test_raft_keeps_the_best_of_a_group_if_it_is_good():
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0])
    out = raft(rewards, torch.tensor([0, 0, 0, 1, 1]))
    assert out.isnan().tolist() == [True, False, False, True, True]
    assert out[1:3].tolist() == [1, 1]
    assert not raft(rewards, torch.tensor([0, 0, 0, 1, 1]), min_reward=-1.0)[3:].isnan().any()


def test_grpo_without_the_spread_is_the_distance_to_the_mean():
    out = grpo(REWARDS, GROUPS, norm_by_std=False)
    assert out.tolist() == pytest.approx([-2, -1, 3, 4])


def test_dapo_punishes_length_and_leaves_out_what_teaches_nothing():
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0])
    lengths = torch.tensor([80, 90, 95, 120])  # limit 100, cache 20: from 80 on, full at 100
    groups = torch.zeros(4)
    assert dapo(rewards, groups, lengths).isnan().all()
    out = dapo(rewards, groups, lengths, overlong_length=100, overlong_cache=20)
    shaped = torch.tensor([1.0, 0.5, 0.25, 0.0])
    torch.testing.assert_close(out, grpo(shaped, groups))
    halved = dapo(
        rewards, groups, lengths, overlong_length=100, overlong_cache=20, overlong_penalty=0.5
    )
    torch.testing.assert_close(halved, grpo(1 - (1 - shaped) / 2, groups))


def test_dapo_refuses_a_cache_that_is_longer_than_the_limit():
    with pytest.raises(ValueError, match="overlong_cache is 30: expected more than 0 and at most"):
        dapo(REWARDS, GROUPS, torch.ones(4), overlong_length=20, overlong_cache=30)

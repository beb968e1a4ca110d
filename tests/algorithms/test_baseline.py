"""Baselines against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.algorithms.advantage import (
    dapo,
    grpo,
    reinforce,
    reinforceplusplus_baseline,
    remax,
    rloo,
)

REWARDS = torch.tensor([0.0, 1.0, 5.0, 4.0])
GROUPS = torch.tensor([0, 0, 0, 1])  # mean 2 of the first; the second is alone


def test_rloo_compares_with_the_mean_of_the_others():
    assert rloo(REWARDS, GROUPS).tolist() == pytest.approx([-3, -1.5, 4.5, 4], abs=1e-5)


def test_reinforce_is_the_reward():
    assert reinforce(REWARDS).tolist() == REWARDS.tolist()


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


def test_reinforce_plus_plus_divides_by_the_std_of_the_differences() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 7.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1])
    # differences 0.5, -0.5, -1, 1: their variance is (0.25 + 0.25 + 1 + 1) / 3
    expected = [x / (math.sqrt(2.5 / 3) + 1e-6) for x in (0.5, -0.5, -1.0, 1.0)]
    found = reinforceplusplus_baseline(rewards, groups)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    # grpo's std over the batch is of the rewards themselves, another number
    assert grpo(rewards, groups, std_cal_level="batch")[0] < 0.5 * found[0]
    equal = torch.tensor([1.0, 0.0, 7.0, 7.0], dtype=torch.float64)
    kept = reinforceplusplus_baseline(equal, groups, std_threshold=0.0)
    assert kept[:2].abs().tolist() == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-6)] * 2, abs=1e-12)
    assert kept[2:].isnan().all()

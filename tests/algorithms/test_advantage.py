"""Advantages against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.algorithms.advantage import by_group, grpo


def test_grpo_subtracts_the_mean_and_divides_by_the_sample_std():
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0])
    out = grpo(rewards, torch.tensor([0, 0, 0, 1, 1]))
    # group 0: mean 1, std 1; group 1: std 0
    assert out.tolist() == pytest.approx([-1, 0, 1, 0, 0], abs=1e-5)


def test_grpo_gives_a_lone_rollout_its_own_reward():
    assert grpo(torch.tensor([3.0]), torch.tensor([0])).item() == pytest.approx(3, rel=1e-5)


def test_grpo_marks_groups_without_spread_when_a_threshold_is_set():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 7.0])
    out = grpo(rewards, torch.tensor([0, 0, 1, 1, 2]), std_threshold=0.0)
    assert out.isnan().tolist() == [True, True, False, False, True]


def test_grpo_over_the_batch_std_keeps_the_group_mean():
    rewards = torch.tensor([0.0, 2.0, 4.0, 4.0])
    out = grpo(rewards, torch.tensor([0, 0, 1, 1]), std_cal_level="batch")
    std = 1.9148542155126762  # sqrt(11 / 3): deviations -2.5, -0.5, 1.5, 1.5
    assert out.tolist() == pytest.approx([-1 / std, 1 / std, 0, 0], abs=1e-5)
    # three more experiences of run 3 with its one reward change no std
    rewards, groups = torch.cat([rewards, torch.full((3,), 4.0)]), torch.tensor([0, 0, *[1] * 5])
    split = grpo(rewards, groups, torch.tensor([0, 1, 2, 3, 3, 3, 3]), std_cal_level="batch")
    assert split[:4].tolist() == pytest.approx(out.tolist(), abs=1e-5)


def test_grpo_counts_a_run_of_several_experiences_once():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    groups = torch.zeros(4, dtype=torch.long)
    split = grpo(rewards, groups, torch.tensor([0, 1, 1, 1]))
    whole = grpo(torch.tensor([1.0, 0.0]), groups[:2])
    torch.testing.assert_close(split, whole[[0, 1, 1, 1]])
    # steps with rewards of their own are members each
    steps = torch.tensor([1.0, 0.0, 0.5, 0.0])
    torch.testing.assert_close(grpo(steps, groups, torch.tensor([0, 1, 1, 1])), grpo(steps, groups))


def test_a_rank_penalty_prefers_the_unlikelier_of_two_right_answers():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])
    groups = torch.tensor([0, 0, 0, 0, 1])
    likely = torch.tensor([-1.0, -2.0, -3.0, -0.5, -4.0])
    out = grpo(rewards, groups, None, likely, rank_penalty=0.5)
    # ranks 2 1 0 3: rewards 0.75 0.875 0 0, mean 0.40625, squares .6679688; the lone one keeps its
    std = (0.66796875 / 3) ** 0.5
    assert out.tolist() == pytest.approx(
        [x / std for x in (0.34375, 0.46875, -0.40625, -0.40625)] + [1], abs=1e-5
    )


def test_a_rank_penalty_counts_a_run_once_and_equal_ones_alike():
    rewards, groups = torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3, dtype=torch.long)
    runs = torch.tensor([0, 1, 1])
    out = grpo(
        rewards, groups, runs, torch.tensor([-1.0, -2.0, -2.0]), rank_penalty=1, norm_by_std=False
    )
    assert out.tolist() == [-0.25, 0.25, 0.25]  # rewards 1/2 and 1 of two runs
    equal = grpo(rewards, groups, None, torch.full((3,), -1.0), rank_penalty=1)
    assert equal.tolist() == [0, 0, 0]


def test_a_rank_penalty_needs_log_probabilities():
    with pytest.raises(ValueError, match="rank_penalty ranks rollouts by their log-probabilities"):
        grpo(torch.zeros(2), torch.zeros(2), rank_penalty=0.1)


def test_grpo_refuses_an_unknown_level():
    with pytest.raises(ValueError, match="'group' or 'batch'"):
        grpo(torch.zeros(1), torch.zeros(1), std_cal_level="task")  # pyright: ignore


def test_by_group_gives_each_member_once():
    members = list(by_group(torch.tensor([4, 2, 4])))
    assert [m.tolist() for m in members] == [[False, True, False], [True, False, True]]


def test_a_reward_too_large_to_square_spoils_its_group_alone():
    rewards = torch.tensor([1e38, 1e38, 0.0, 2.0])
    out = grpo(rewards, torch.tensor([0, 0, 1, 1]))
    assert out[:2].isnan().all()
    assert out[2:].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    assert grpo(torch.full((3,), 0.1), torch.zeros(3), std_threshold=0.0).isnan().all()


@pytest.mark.parametrize("broken", [[math.nan, 0.0], [1e20, 0.0], [math.nan]])
def test_a_reward_that_is_no_number_spoils_its_group_alone_over_the_batch_too(broken):
    rewards = torch.tensor([*broken, 0.0, 2.0, 1.0, 5.0])
    groups = torch.tensor([0] * len(broken) + [1, 1, 2, 2])
    out = grpo(rewards, groups, std_cal_level="batch")
    alone = grpo(rewards[len(broken) :], groups[len(broken) :], std_cal_level="batch")
    assert out[len(broken) :].tolist() == alone.tolist()
    assert out[: len(broken)].isnan().any()

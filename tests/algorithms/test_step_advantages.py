"""Advantages of episodes with several steps, against values worked out by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trireme.algorithms.advantage import last_steps, step_wise_grpo

# one task, two runs: run 0 has steps 0, 1, 2 and ends with 1; run 1 has step 0 and ends with 0
REWARDS = torch.tensor([1.0, 1.0, 0.0, 1.0])
GROUPS = torch.tensor([0, 0, 0, 0])
RUNS = torch.tensor([0, 0, 1, 0])
STEPS = torch.tensor([2, 0, 0, 1])
SCORE = 0.5 / math.sqrt(0.5)  # rewards 1 and 0: mean 0.5, sample std sqrt(0.5)


def close(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=0)


def test_the_last_step_is_the_one_with_the_highest_number() -> None:
    run_of, last = last_steps(GROUPS, RUNS, STEPS)
    assert run_of.tolist() == [0, 0, 1, 0] and last.tolist() == [0, 2]


def test_the_score_of_the_last_step_goes_to_all_steps_of_its_run() -> None:
    found = step_wise_grpo(REWARDS, GROUPS, RUNS, STEPS)
    close(found, [SCORE, SCORE, -SCORE, SCORE])


def test_step_norm_divides_by_the_number_of_steps() -> None:
    found = step_wise_grpo(REWARDS, GROUPS, RUNS, STEPS, enable_step_norm=True)
    close(found, [SCORE / 3, SCORE / 3, -SCORE, SCORE / 3])


def test_a_task_whose_runs_ended_alike_is_left_out() -> None:
    rewards = torch.tensor([0.5, 9.0, 0.5])  # the first step's own reward does not count
    groups, runs, steps = torch.zeros(3).int(), torch.tensor([0, 0, 1]), torch.tensor([1, 0, 0])
    assert step_wise_grpo(rewards, groups, runs, steps, std_threshold=0.1).isnan().all()


def test_equal_run_numbers_of_two_tasks_are_two_runs() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    groups, runs = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    found = step_wise_grpo(rewards, groups, runs, torch.zeros(4).int())
    close(found, [SCORE, -SCORE, -SCORE, SCORE])

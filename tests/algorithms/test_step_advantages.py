"""Advantages of episodes with several steps, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trireme.algorithms.advantage import gigpo, last_steps, step_wise_grpo
from trireme.algorithms.assign import assign_advantages
from trireme.algorithms.part import make_part
from trireme.experience import EID, Experience
from trireme.registry import ADVANTAGES

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


def test_gigpo_adds_what_a_step_did_better_than_others_in_its_state() -> None:
    """Both runs are in state 5 once: run 0 gets 0 + 1 from there on, run 1 gets 0."""
    step_rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])  # in the order of REWARDS
    anchors = torch.tensor([7, 5, 5, 6])
    found = gigpo(REWARDS, GROUPS, RUNS, STEPS, step_rewards, anchors)
    close(found, [0.5, 0.5 + 0.5, -0.5 - 0.5, 0.5])
    half = gigpo(REWARDS, GROUPS, RUNS, STEPS, step_rewards, anchors, omega=0.5, gamma=0.5)
    # discounted: 1 * 0.5^2 from step 0 of run 0
    close(half, [0.5, 0.5 + 0.5 * 0.125, -0.5 - 0.5 * 0.125, 0.5])
    scaled = gigpo(REWARDS, GROUPS, RUNS, STEPS, step_rewards, anchors, omega=0.0, fnorm="std")
    close(scaled, [SCORE, SCORE, -SCORE, SCORE])


def episode(run: int, rewards: list[float], states: list[str]) -> list[Experience]:
    return [
        Experience(
            [1, 2, 3],
            prompt_length=1,
            eid=EID("1", "0", run, step),
            reward=reward,
            info={"step_reward": reward, "env_state_hash": state},
        )
        for step, (reward, state) in enumerate(zip(rewards, states, strict=True))
    ]


def test_steps_and_states_come_from_the_experiences() -> None:
    experiences = episode(0, [0.0, 1.0], ["start", "door"]) + episode(1, [0.0], ["start"])
    kept, _ = assign_advantages(
        make_part("advantage_fn", ADVANTAGES, "gigpo", {"omega": 2.0}), experiences
    )
    # returns 1 and 0: +-0.5; in "start" 1 and 0 to go: +-0.5 times omega
    found = [float(e.advantages[-1]) for e in kept]  # type: ignore[index]
    assert found == pytest.approx([1.5, 0.5, -1.5])


def test_a_run_that_says_what_some_steps_earned_earned_nothing_in_the_others() -> None:
    experiences = episode(0, [0.5, 1.0], ["a", "b"]) + episode(1, [0.0, 1.0], ["c", "d"])
    del experiences[1].info["step_reward"]  # the last step of run 0: 0, not its reward of 1
    for silent in experiences[2:]:
        del silent.info["step_reward"]  # run 1 never says: its last step has the reward
    kept, _ = assign_advantages(make_part("advantage_fn", ADVANTAGES, "gigpo", {}), experiences)
    found = [float(e.advantages[-1]) for e in kept]  # type: ignore[index]
    assert found == pytest.approx([-0.25, -0.25, 0.25, 0.25])  # returns 0.5 and 1


def test_a_run_of_one_step_that_says_nothing_earned_its_reward_there() -> None:
    experiences = episode(0, [1.0], ["a"]) + episode(1, [0.0], ["b"])
    for silent in experiences:
        del silent.info["step_reward"]
    kept, _ = assign_advantages(make_part("advantage_fn", ADVANTAGES, "gigpo", {}), experiences)
    assert [float(e.advantages[-1]) for e in kept] == [0.5, -0.5]  # type: ignore[index]

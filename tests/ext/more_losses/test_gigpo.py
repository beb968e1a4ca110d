"""GiGPO against values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from tests.algorithms.test_step_advantages import GROUPS, REWARDS, RUNS, SCORE, STEPS, close
from trireme.algorithms.assign import assign_advantages
from trireme.algorithms.part import make_part
from trireme.experience import EID, Experience
from trireme.ext.more_losses.advantages import gigpo


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


@pytest.mark.parametrize("size", [3, 7, 8])
def test_gigpo_learns_nothing_from_equal_returns(size: int) -> None:
    """`fnorm: std` divides by nearly nothing then."""
    groups = torch.arange(3).repeat_interleave(size)
    rewards = torch.tensor([0.1, 0.3, 0.7]).repeat_interleave(size)
    runs, first = torch.arange(size).repeat(3), torch.zeros(3 * size, dtype=torch.long)
    found = gigpo(rewards, groups, runs, first, rewards, groups, fnorm="std")
    assert found.tolist() == [0.0] * len(rewards)


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
    kept, _ = assign_advantages(make_part("advantage_fn", "gigpo", {"omega": 2.0}), experiences)
    # returns 1 and 0: +-0.5; in "start" 1 and 0 to go: +-0.5 times omega
    found = [float(e.advantages[-1]) for e in kept]  # type: ignore[index]
    assert found == pytest.approx([1.5, 0.5, -1.5])


def test_a_run_that_says_what_some_steps_earned_earned_nothing_in_the_others() -> None:
    experiences = episode(0, [0.5, 1.0], ["a", "b"]) + episode(1, [0.0, 1.0], ["c", "d"])
    del experiences[1].info["step_reward"]  # the last step of run 0: 0, not its reward of 1
    for silent in experiences[2:]:
        del silent.info["step_reward"]  # run 1 never says: its last step has the reward
    kept, _ = assign_advantages(make_part("advantage_fn", "gigpo", {}), experiences)
    found = [float(e.advantages[-1]) for e in kept]  # type: ignore[index]
    assert found == pytest.approx([-0.25, -0.25, 0.25, 0.25])  # returns 0.5 and 1


def test_a_run_of_one_step_that_says_nothing_earned_its_reward_there() -> None:
    experiences = episode(0, [1.0], ["a"]) + episode(1, [0.0], ["b"])
    for silent in experiences:
        del silent.info["step_reward"]
    kept, _ = assign_advantages(make_part("advantage_fn", "gigpo", {}), experiences)
    assert [float(e.advantages[-1]) for e in kept] == [0.5, -0.5]  # type: ignore[index]

"""GDPO against hand-worked numbers, and what it learns of each reward."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.algorithms.advantage import grpo
from trireme.algorithms.assign import assign_advantages
from trireme.algorithms.part import make_part
from trireme.experience import EID, Experience
from trireme.registry import ADVANTAGES


def test_gdpo_normalises_each_reward_by_itself() -> None:
    """Two groups of two; the second reward is a hundredfold, and does not apply to the last."""
    parts = torch.tensor([[1.0, 0.0], [0.0, 100.0], [1.0, 100.0], [0.0, math.nan]]).double()
    groups = torch.tensor([0, 0, 1, 1])
    weights = torch.tensor([1.0, 0.5]).double()
    found = ADVANTAGES.get("gdpo")(groups, parts, weights, epsilon=0.0)
    # std of {0, 1} is sqrt(1/2), so that both rewards give +-z; in group 1 the second is alone.
    z = math.sqrt(0.5)
    summed = [z - 0.5 * z, -z + 0.5 * z, z, -z]
    std = math.sqrt(sum(x * x for x in summed) / 3)  # their mean is 0
    assert found.tolist() == pytest.approx([x / std for x in summed], abs=1e-6)


@pytest.mark.parametrize("size", [3, 6, 7, 8])
def test_gdpo_learns_nothing_from_groups_of_equal_rewards(size: int) -> None:
    """Whitening divides by nearly nothing then: a rounding of the mean would be an advantage."""
    groups = torch.arange(6).repeat_interleave(size)
    rewards = torch.tensor([0.1, 0.3, 0.7, 0.2, 0.9, 0.6]).repeat_interleave(size)
    parts = torch.stack([rewards, torch.full_like(rewards, 0.05)], 1)
    found = ADVANTAGES.get("gdpo")(groups, parts, torch.ones(2))
    assert found.tolist() == [0.0] * len(groups)


def test_gdpo_counts_a_run_once_as_grpo_does() -> None:
    """A run of four experiences against two of one; the second reward applies to none of them."""
    first = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]).double()
    parts = torch.stack([first, torch.full_like(first, torch.nan)], 1)
    groups, runs = torch.zeros(6, dtype=torch.long), torch.tensor([0, 0, 0, 0, 1, 2])
    gdpo = ADVANTAGES.get("gdpo")
    found = gdpo(groups, parts, torch.ones(2).double(), runs, epsilon=0.0)
    expected = grpo(first, groups, runs, epsilon=0.0)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)
    assert expected[0] == pytest.approx(2 / math.sqrt(3))  # 2/3 over the std of {1, 0, 0}
    alone = gdpo(groups[:4], parts[:4], torch.ones(2).double(), runs[:4])
    assert alone.tolist() == [0, 0, 0, 0]


def _with_parts(task: int, run: int, reward: float, **parts: tuple[float, float]) -> Experience:
    info = {"reward_parts": parts}
    return Experience([1, 2], prompt_length=1, reward=reward, eid=EID(1, task, run), info=info)


def test_gdpo_weighs_a_reward_as_its_own_taskset_does() -> None:
    """Two tasksets that weigh reward a differently; in the second, b is the larger."""
    given = [
        _with_parts(0, 0, 5.0, a=(1.0, 5.0), b=(0.0, 1.0)),
        _with_parts(0, 1, 1.0, a=(0.0, 5.0), b=(1.0, 1.0)),
        _with_parts(1, 0, 0.5, a=(1.0, 0.5), b=(0.0, 1.0)),
        _with_parts(1, 1, 1.0, a=(0.0, 0.5), b=(1.0, 1.0)),
    ]
    part = make_part("advantage_fn", "gdpo", {})
    kept, _ = assign_advantages(part, given)
    found = [float(e.advantages[-1]) for e in kept if e.advantages is not None]
    assert found[0] > 0 > found[1] and found[2] < 0 < found[3]
    assert found[0] == pytest.approx(-8 * found[2], rel=1e-3)  # 5 - 1 against 0.5 - 1


def test_gdpo_refuses_a_reward_that_its_parts_are_not() -> None:
    part = make_part("advantage_fn", "gdpo", {})
    known = _with_parts(0, 0, 1.0, a=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"experience 1/0/1.* has a reward without parts"):
        assign_advantages(part, [known, _with_parts(0, 1, 9.0)])
    with pytest.raises(ValueError, match=r"is 3 and its parts come to 1.*reward_shaping_mapper"):
        assign_advantages(part, [known, _with_parts(0, 1, 3.0, a=(1.0, 1.0))])
    assert len(assign_advantages(part, [known, _with_parts(0, 1, 0.0, a=(0.0, 1.0))])[0]) == 2
    too_long = _with_parts(0, 1, 0.0)
    too_long.mask = torch.zeros_like(too_long.mask)
    kept, _ = assign_advantages(part, [known, too_long])
    assert len(kept) == 2


def test_gdpo_finds_what_workflows_leave_of_each_reward() -> None:
    given = [
        Experience(
            [1, 2], prompt_length=1, reward=r, eid=EID(1, 0, run), info={"reward_parts": parts}
        )
        for run, (r, parts) in enumerate(
            [(1.0, {"a": (1.0, 1.0), "b": [0.0, 2.0]}), (2.0, {"a": (0.0, 1.0), "b": [1.0, 2.0]})]
        )
    ]
    part = make_part("advantage_fn", "gdpo", {})
    kept, _ = assign_advantages(part, given)
    signs = [float(e.advantages[-1]) for e in kept if e.advantages is not None]
    assert signs == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-3)
    for experience in given:
        experience.info.clear()
    with pytest.raises(ValueError, match="asks for 'reward_parts'"):
        assign_advantages(part, given)

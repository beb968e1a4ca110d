"""Gymnasium's own FrozenLake, as text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not installed: make test-extras runs these")

from tests.model.fake import make
from trireme.ext.environments.gyms import TextGym
from trireme.task import Task
from trireme.usercode import Refused
from trireme.workflows.workflow import resolve

LAKE = {
    "env_id": "FrozenLake-v1",
    "actions": ["left", "down", "right", "up"],
    "env_args": {"is_slippery": False, "render_mode": "ansi"},
}
WAY = ["down", "down", "right", "right", "down", "right"]


def play(replies: list[str], **args: Any) -> Any:
    async def main() -> Any:
        task = Task({"prompt": 3}, workflow_args={**LAKE, **args})
        return await resolve("gym_workflow").call(task, make(replies), 1, 0)

    return asyncio.run(main())


def test_a_way_over_the_lake() -> None:
    (e,) = play([f"I go <action>{action}</action>" for action in WAY])
    assert e.reward == 1.0 and e.metrics["actual_env_steps"] == 6
    seen = [m["content"] for m in e.messages or [] if m["role"] == "user"]
    assert seen[0] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert seen[1] == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"


def test_steps_and_holes() -> None:
    found = play(["down", "right"], per_step=True)
    assert len(found) == 2 and all(e.reward == 0.0 for e in found)
    assert found[-1].metrics["env_done"] == 1.0


def test_what_is_no_action_brings_the_names() -> None:
    (e,) = play(["fly", "down", "right"])
    assert (e.messages or [])[2]["content"] == "Choose one of: left, down, right, up"


def test_a_reward_that_is_none_is_told_as_such() -> None:
    gymnasium = pytest.importorskip("gymnasium")

    class Forgetful(gymnasium.Env[int, int]):
        observation_space = action_space = gymnasium.spaces.Discrete(2)

        def reset(self, **_: Any) -> Any:
            return 0, {}

        def step(self, action: int) -> Any:
            return 1, None, False, False, {}

    gymnasium.register("Forgetful-v0", Forgetful, disable_env_checker=True)
    with pytest.raises(Refused, match=r"step of .* gave the reward None: expected a number, 0"):
        play(["1"], env_id="Forgetful-v0", actions=[], env_args={})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"actions": ["a"]}, "FrozenLake-v1 has 4 actions, and 1 names were given"),
        ({"env_id": "Pendulum-v1", "env_args": {}}, "expected Discrete or Text"),
        ({"env_id": "FrozenLak-v1"}, "FrozenLak-v1 cannot be made: .*doesn't exist"),
        ({"env_args": {"is_slipery": True}}, "FrozenLake-v1 cannot be made: .*'is_slipery'"),
        ({"actions": ["left", True, "a", "b"]}, "the action True is no text: write .* in quotes"),
    ],
)
def test_what_does_not_fit_is_said(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextGym(**{**LAKE, "seed": 0, **args})


def test_an_environment_that_cannot_be_made_is_refused_before_the_run() -> None:
    examine = resolve("gym_workflow").examine
    assert examine is not None
    examine(Task({"prompt": 3}, workflow_args=LAKE))
    with pytest.raises(ValueError, match="FrozenLak-v1 cannot be made"):
        examine(Task({"prompt": 3}, workflow_args={**LAKE, "env_id": "FrozenLak-v1"}))


def test_an_episode_is_that_of_its_seed() -> None:
    slippery = {**LAKE, "env_args": {"is_slippery": True, "render_mode": "ansi"}}

    def walk() -> list[str]:
        env = TextGym(**slippery, seed=5)
        env.reset()
        return [env.step("right")[0] for _ in range(3)]

    assert walk() == walk()


def way_over(lake: list[str]) -> list[str]:
    """The shortest way from the start to the goal."""
    moves = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    ways: dict[tuple[int, int], list[str]] = {(0, 0): []}
    for place in (places := [(0, 0)]):
        for name, (down, right) in moves.items():
            y, x = place[0] + down, place[1] + right
            inside = 0 <= y < len(lake) and 0 <= x < len(lake)
            if inside and lake[y][x] != "H" and (y, x) not in ways:
                ways[y, x] = [*ways[place], name]
                places.append((y, x))
    return ways[len(lake) - 1, len(lake) - 1]


def test_a_frozen_lake_is_that_of_its_row() -> None:
    maps = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake")
    row = {"prompt": "go", "size": 5, "p": 0.7, "seed": 11}
    lake = maps.generate_random_map(5, 0.7, 11)
    workflow = resolve("frozen_lake_workflow")

    def played(replies: list[str], **args: Any) -> Any:
        return asyncio.run(workflow.call(Task(row, workflow_args=args), make(replies), 1, 0))

    (e,) = played(way_over(lake))
    seen = [m["content"] for m in e.messages or [] if m["role"] == "user"]
    assert seen[0].replace("[", "").replace("]", "") == "\n".join(lake)
    assert e.reward == 1.0
    (late,) = played(way_over(lake), agent_max_steps=3)
    assert late.reward == 0.0 and late.metrics["actual_env_steps"] == 3
    (cut,) = played(way_over(lake), env_max_steps=2)
    assert cut.metrics["actual_env_steps"] == 2

"""Gymnasium's own FrozenLake, as text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not installed: make test-extras runs these")

from tests.model.fake import make
from trireme.envs.gyms import TextGym
from trireme.task import Task
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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"actions": ["a"]}, "FrozenLake-v1 has 4 actions, and 1 names were given"),
        ({"env_id": "Pendulum-v1", "env_args": {}}, "expected Discrete or Text"),
    ],
)
def test_what_does_not_fit_is_said(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextGym(**{**LAKE, "seed": 0, **args})


def test_an_episode_is_that_of_its_seed() -> None:
    slippery = {**LAKE, "env_args": {"is_slippery": True, "render_mode": "ansi"}}

    def walk() -> list[str]:
        env = TextGym(**slippery, seed=5)
        env.reset()
        return [env.step("right")[0] for _ in range(3)]

    assert walk() == walk()

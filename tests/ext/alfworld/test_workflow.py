from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workflows.made import examine_rows
from tests.workflows.test_workflow import call
from trireme.envs.env import Seen
from trireme.experience import Experience
from trireme.ext.alfworld.game import KEYS
from trireme.ext.alfworld.workflow import (
    HINT,
    AlfworldWorkflow,
    StepWiseAlfworldWorkflow,
    format_observation,
    parse_action,
)
from trireme.task import Task
from trireme.workflows.workflow import resolve


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<think>a</think><action> go to desk 1 </action>", "go to desk 1"),
        ("<action>look</action><action>inventory</action>", "look"),
        ("look", ""),
        ("<action>look", ""),
        ("<action>take a\nfrom b</action>", "take a\nfrom b"),
    ],
)
def test_the_action_is_between_its_tags(reply: str, action: str) -> None:
    assert parse_action(reply) == action


def test_an_action_without_effect_brings_a_hint() -> None:
    assert format_observation("You see a desk 1.") == "Observation: You see a desk 1."
    assert format_observation("Nothing happens.") == f"Observation: Nothing happens.\n{HINT}"


@pytest.mark.parametrize("remind", [True, False])
def test_the_task_is_said_again_where_that_is_asked_for(remind: bool) -> None:
    task = Task({"prompt": "game"}, workflow_args={"remind_task": remind})
    workflow = AlfworldWorkflow(task=task, model=None)  # type: ignore[arg-type]
    first = "You see a desk 1.\n\nYour task is to: look."
    assert workflow.format_observation(Seen(first)) == f"Observation: {first}"
    expected = "Observation: Done." + "\nYour task is to: look." * remind
    assert workflow.format_observation(Seen("Done.")) == expected


class Room:
    """Done by the second look in an episode."""

    def reset(self) -> Any:
        self.looks = 0
        return "a room. Your task is to: look twice.", {}

    def step(self, action: str) -> Any:
        self.looks += action == "look"
        return "a room", float(self.looks == 2), self.looks == 2, {}

    def close(self) -> None:
        self.looks = -1


def test_step_by_step_each_step_is_an_experience(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room()
    monkeypatch.setattr("trireme.ext.alfworld.workflow.create_environment", lambda *given: room)
    replies = ["<action>look</action>", "wait", "<action>look</action>"]
    found = call(StepWiseAlfworldWorkflow, replies)
    assert [e.reward for e in found] == [1.0] * 3
    assert [e.info["step_reward"] for e in found] == [0.0, 0.0, 1.0]
    assert found[0].metrics["env_done"] == 1.0 and found[0].metrics["env_rounds"] == 2.0
    assert found[0].metrics["actual_env_steps"] == 3.0 and room.looks == -1


def test_a_subclass_that_gives_the_reward_alone_is_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counted(StepWiseAlfworldWorkflow):
        def reward(self, exps: list[Experience]) -> float:
            return float(len(exps))

    monkeypatch.setattr("trireme.ext.alfworld.workflow.create_environment", lambda *given: Room())
    found = call(Counted, ["<action>look</action>"] * 2)
    assert [e.reward for e in found] == [2.0, 2.0]


@pytest.mark.parametrize(
    "workflow",
    [
        *("alfworld_workflow", "step_wise_alfworld_workflow", "RAFT_alfworld_workflow"),
        *("RAFT_reflect_alfworld_workflow", "RAFT_household_workflow"),
        "RAFT_reflect_household_workflow",
    ],
)
def test_a_misspelt_option_and_a_reward_are_refused(workflow: str) -> None:
    spec = resolve(workflow)
    spec.refuse_unused(Task({"prompt": "1"}, workflow_args={"max_env_steps": 30}))
    with pytest.raises(ValueError, match=r"no option 'max_env_step' .did you mean 'max_env_steps'"):
        spec.refuse_unused(Task({"prompt": "1"}, workflow_args={"max_env_step": 30}))
    with pytest.raises(ValueError, match=r"'math_reward', which workflow .* does not use"):
        spec.refuse_unused(Task({"prompt": "1"}, reward_fn="math_reward"))


@pytest.mark.parametrize(
    ("workflow", "begin"),
    [("alfworld_workflow", "make_env"), ("step_wise_alfworld_workflow", "open")],
)
def test_the_engine_ends_no_episode_before_max_env_steps(
    workflow: str, begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[dict[str, Any]] = []

    def lend(**given: Any) -> Room:
        lent.append(given)
        return Room()

    pool = SimpleNamespace(lend=lend, lend_blocking=lend)
    monkeypatch.setattr("trireme.ext.alfworld.workflow._pool", lambda *given: pool)
    task = Task({"prompt": "game"}, workflow_args={"max_env_steps": 300})
    played = resolve(workflow).code(task=task, model=None)
    getattr(played, begin)()
    assert lent[0]["max_steps"] > 300


@pytest.mark.parametrize(
    "workflow",
    ["alfworld_workflow", "step_wise_alfworld_workflow", "RAFT_reflect_alfworld_workflow"],
)
def test_a_row_without_a_game_is_refused_before_the_run(workflow: str, tmp_path: Path) -> None:
    examine = resolve(workflow).examine
    assert examine is not None
    with pytest.raises(ValueError, match=r"gone.tw-pddl: there is no such file"):
        examine(Task({"prompt": str(tmp_path / "gone.tw-pddl")}))
    game = tmp_path / "game.tw-pddl"
    game.write_text(json.dumps(dict.fromkeys(KEYS, "")))
    examine(Task({"prompt": str(game)}))


@pytest.mark.parametrize(
    "workflow",
    ["alfworld_workflow", "step_wise_alfworld_workflow", "RAFT_reflect_alfworld_workflow"],
)
def test_a_later_row_without_a_game_is_refused_before_the_run(
    workflow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AlfworldWorkflow, "needs", lambda task: {})
    game = tmp_path / "game.tw-pddl"
    game.write_text(json.dumps(dict.fromkeys(KEYS, "")))
    rows = [{"prompt": str(game)}, {"prompt": str(tmp_path / "gone.tw-pddl")}]
    with pytest.raises(ValueError, match=r"dataset 'x', row 1: game file .*gone.tw-pddl: there"):
        examine_rows(workflow, rows)

from __future__ import annotations

import pytest

from trireme.envs.env import Seen
from trireme.task import Task
from trireme.workflows.alfworld import HINT, AlfworldWorkflow, format_observation, parse_action


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

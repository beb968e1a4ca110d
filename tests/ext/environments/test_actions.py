"""Which action a text names, in environments of a gymnasium that is made up here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from trireme.ext.environments.gyms import TextGym


class Discrete:
    """Gymnasium's space of actions."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start


class Shown:
    """An environment whose observation is the action."""

    render_mode = None

    def __init__(self, n: int, start: int = 0) -> None:
        self.action_space = Discrete(n, start)

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"acted {action}", 0.0, False, False, {}


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium = SimpleNamespace(make=lambda env_id, **args: Shown(**args))
    monkeypatch.setitem(sys.modules, "gymnasium", gymnasium)


@pytest.mark.parametrize(
    ("actions", "text", "acted"),
    [
        ((), "3", 3),
        ((), "12", 12),
        ((), "first 3, then action 10.", 10),
        (("up", "down", "up-left", "pick up"), "up-left", 2),
        (("up", "down", "up-left", "pick up"), "Pick up", 3),
        (("up", "down", "up-left", "pick up"), "pick, not up", 0),
        (("left", "right", "noop", "op"), "noop", 2),
        (("左", "右", "左上", "上"), "我向左上走", 2),  # text without spaces between its words
    ],
)
def test_an_action_is_the_whole_name(actions: Sequence[str], text: str, acted: int) -> None:
    env = TextGym("made-up", seed=0, actions=actions, env_args={"n": len(actions) or 18})
    assert env.step(text)[0] == f"acted {acted}"


def test_part_of_a_word_is_no_action() -> None:
    env = TextGym("made-up", seed=0, actions=["up", "down"], env_args={"n": 2})
    assert env.step("upside")[0] == "Choose one of: up, down"
    env = TextGym("made-up", seed=0, env_args={"n": 2})
    assert env.step("12")[0] == "Choose one of: 0, 1"


def test_numbers_begin_where_the_environment_begins_to_count() -> None:
    env = TextGym("made-up", seed=0, env_args={"n": 3, "start": 1})
    assert env.step("0")[0] == "Choose one of: 1, 2, 3"
    assert env.step("3")[0] == "acted 3"
    env = TextGym("made-up", seed=0, actions=["a", "b", "c"], env_args={"n": 3, "start": -1})
    assert env.step("a")[0] == "acted -1"

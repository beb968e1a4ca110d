from __future__ import annotations

import random

import pytest

from trireme.ext.environments.household import NOTHING, PLACES, Household, Layout, clumsy_action

LAYOUT = Layout(
    things=(("key", "box"), ("cup", "desk"), ("pen", "desk")),
    target="key",
    goal="shelf",
)
END = "key to shelf"


def test_a_whole_episode() -> None:
    env = Household(LAYOUT)
    assert env.reset()[0] == f"start . {END}"
    for action, seen in [
        ("go desk", f"at desk : cup pen . {END}"),
        ("go box", f"at box : closed . {END}"),
        ("open box", f"at box : key . {END}"),
        ("take key", f"hold key . {END}"),
        ("go desk", f"at desk : cup pen . {END}"),
        ("take cup", f"{NOTHING} . {END}"),  # it holds something
        ("go shelf", f"at shelf : nothing . {END}"),
    ]:
        observation, reward, done, _ = env.step(action)
        assert (observation, reward, done) == (seen, 0.0, False)
    observation, reward, done, info = env.step("put key")
    assert observation.startswith("at shelf : key") and reward == 1.0 and done and info["valid"]


@pytest.mark.parametrize(
    "action", ["", "fly", "go", "go moon", "open desk", "take key", "put key", "take", "go desk x"]
)
def test_what_is_not_possible_does_nothing(action: str) -> None:
    env = Household(LAYOUT)
    env.step("go desk")
    before = env.state
    seen, reward, done, info = env.step(action)
    assert seen.startswith(NOTHING) and not reward and not done and not info["valid"]
    assert env.state == before == info["env_state_hash"]


def test_layouts_are_those_of_their_numbers_and_solvable() -> None:
    for number in range(200):
        layout = Layout.numbered(number)
        assert layout == Layout.numbered(number)
        where = dict(layout.things)
        assert where[layout.target] != layout.goal and set(where.values()) <= set(PLACES)
        env, source = Household(layout), random.Random(number)
        done = any(env.step(clumsy_action(env, source))[2] for _ in range(200))
        assert done
    assert len({Layout.numbered(n) for n in range(200)}) > 190


def test_the_lazy_leave_what_is_closed() -> None:
    env, source = Household(LAYOUT), random.Random(0)
    env.step("go box")
    assert clumsy_action(env, source) == "open box"
    assert clumsy_action(env, source, laziness=1.0).startswith("go ")
    env.step("open box")
    assert clumsy_action(env, source, laziness=1.0) == "take key"

"""The page on conversations of several turns."""

from __future__ import annotations

from tests.ext.multi_turn.test_scheduler import run as play
from tests.model.fake import make
from tests.test_pages import USER, Page
from tests.test_pages import page as page
from trireme import Task


def test_multi_turn(page: Page) -> None:
    page("multi_turn.md")
    again = Task(
        {"messages": USER, "solution": "4"},
        workflow_args={"scheduler": "again", "max_turns": 3},
        reward_fn_args={"funcs": ["accuracy"]},
    )
    [experience] = play(make(["5", "4"]), again)
    assert experience.messages is not None
    assert [m["content"] for m in experience.messages] == ["?", "5", "No. Again.", "4"]
    gym = {"scheduler": "gym_scheduler", "env": "guess", "max_turns": 4}
    guess = Task({"messages": USER, "env_config": {"secret": "7"}}, workflow_args=gym)
    [experience] = play(make(["5", "7"]), guess)
    assert experience.reward == 1.0
    short = {**gym, "context_manager": "last_turns", "ctx_config": {"keep": 1}}
    guess = Task({"messages": USER, "env_config": {"secret": "7"}}, workflow_args=short)
    assert [e.reward for e in play(make(["5", "6", "7"]), guess)] == [1.0, 1.0, 1.0]

"""The original behind the workflow. The package cannot be installed here: a stand-in under its name
records how it is called, and proves nothing about its pages.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from tests.limits import HANG_S
from tests.model.fake import make
from trireme.ext.webshop import env as original
from trireme.task import Task
from trireme.workflows.workflow import resolve


class Server:
    """What the stand-in loads once."""

    def __init__(self) -> None:
        self.user_sessions: dict[str, int] = {}
        self.drawn = random.random()
        random.seed(233)


class StandIn:
    """The calls of `WebAgentTextEnv`: one page, and `click[buy now]` pays by the goal's number."""

    made: list[dict[str, Any]]

    def __init__(self, observation_mode: str = "html", server: Any = None, **options: Any) -> None:
        self.made.append({"observation_mode": observation_mode, **options})
        self.server = Server() if server is None else server
        self.prefix = options.get("session_prefix") or ""
        self.reset()

    def reset(self, session: Any = None) -> tuple[str, None]:
        self.session = self.prefix + str(session)
        self.server.user_sessions[self.session] = session or 0
        return "the page", None

    def step(self, action: str) -> tuple[str, float, bool, None]:
        done = action.lower() == "click[buy now]"
        return "the page", self.server.user_sessions[self.session] / 4 if done else 0, done, None

    def get_available_actions(self) -> dict[str, Any]:
        return {"has_search_bar": True, "clickables": ["buy now"]}

    def close(self) -> None:
        self.session = ""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    package, envs = ModuleType("web_agent_site"), ModuleType("web_agent_site.envs")
    package.__spec__ = object()  # type: ignore[assignment]
    envs.WebAgentTextEnv = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "web_agent_site", package)
    monkeypatch.setitem(sys.modules, "web_agent_site.envs", envs)
    monkeypatch.setattr(original, "_servers", {})
    monkeypatch.setattr(StandIn, "made", [], raising=False)
    return StandIn.made


async def shop(number: int, **args: Any) -> Any:
    replies = iter(["<action>search[lamp]</action>", "<action>click[Buy Now]</action>"])
    task = Task({"prompt": number}, workflow_args=args)
    return await resolve("webshop_workflow").call(task, make(replies, max_model_len=16000), 1, 0)


@pytest.mark.parametrize("asked", [True, "auto"])
def test_episodes_share_one_server_and_leave_nothing(asked: Any, made: list[Any]) -> None:
    random.seed(8)
    before = random.getstate()

    async def main() -> list[Any]:
        return await asyncio.gather(
            *(shop(n, original=asked, num_products=1000, show_attrs=True) for n in (3, 3, 2))
        )

    rewards = [experience.reward for (experience,) in asyncio.run(main())]
    assert rewards == [0.75, 0.75, 0.5]
    loaded, *sessions = made
    assert loaded == {"observation_mode": "text_rich", "human_goals": True, "num_products": 1000,
                      "limit_goals": -1, "show_attrs": True}  # fmt: skip
    assert len(sessions) == len({options["session_prefix"] for options in sessions}) == 3
    (server,) = original._servers.values()
    until = time.monotonic() + HANG_S
    while len(server.user_sessions) > 1 and time.monotonic() < until:
        time.sleep(0.005)  # the threads close their sessions when the episodes are over
    assert list(server.user_sessions) == ["None"]  # of the loading itself
    assert random.getstate() == before  # whatever the package did to the global source
    assert server.drawn == random.Random(0).random()  # it drew after our seed


def test_it_says_what_to_do_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "web_agent_site", None)
    with pytest.raises(ModuleNotFoundError, match="leave it out to use the built-in shop"):
        original.OriginalEnv()


def test_original_is_true_false_or_auto() -> None:
    with pytest.raises(ValueError, match="original is 'yes': expected true, false or auto"):
        asyncio.run(shop(0, original="yes"))


def test_auto_is_the_built_in_shop_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    with pytest.raises(ValueError, match="WEBSHOP_DATA is not set"):
        asyncio.run(shop(0, original="auto"))

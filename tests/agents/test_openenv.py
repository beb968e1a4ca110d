"""A server of OpenEnv, made with its own package, as a workflow."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from tests.model.fake import FakeEngine
from trireme.explorer.runner import Outcome, Runner, TimeLimit
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.task import Task
from trireme.workflows.workflow import resolve

server = pytest.importorskip(
    "openenv.core.env_server", reason="make test-agents installs openenv-core"
)
types = pytest.importorskip("openenv.core.env_server.types")


class Guess(types.Action):
    number: str


class Told(types.Observation):
    text: str


class Guessing(server.Environment):
    """Higher or lower; the number is the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        self._number = seed
        return Told(text="Guess.", reward=None, done=False)

    def step(self, action: Guess, **_: Any) -> Told:
        if not action.number.isdigit():
            return Told(text="A number!", reward=-0.5, done=False)
        right = int(action.number) == self._number
        said = (
            "Yes." if right else "Higher." if int(action.number) < (self._number or 0) else "Lower."
        )
        return Told(text=said, reward=float(right), done=right)

    @property
    def state(self) -> Any:
        return types.State()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = server.create_fastapi_app(Guessing, Guess, Told, max_concurrent_envs=8)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        own = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=own.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        own.should_exit = True
        thread.join(30)


def play(replies: list[str], times: int = 1, **options: Any) -> tuple[Outcome, FakeEngine]:
    task = Task({"prompt": "7"}, workflow="openenv_workflow", workflow_args=options)

    async def main() -> tuple[Outcome, FakeEngine]:
        engine = FakeEngine(replies)
        whole: Any = engine
        chat = ChatTokens(engine.tokenizer)

        def make(task: Task, key: tuple[Any, ...]) -> Model:
            return Model(whole, chat, key=key, max_model_len=4000)

        spec = resolve("openenv_workflow")
        assert spec.examine is not None
        spec.examine(task)
        runner = Runner(make, whole, limit=TimeLimit(60), max_retries=0)
        return await runner.run(task, spec, range(times)), engine

    return asyncio.run(main())


def test_replies_are_actions_and_rewards_are_the_servers(url: str) -> None:
    replies = ["a", "3", "9", "7"]
    outcome, engine = play(replies, url=url, action="number", observation="text")
    assert not outcome.failures, outcome.failures[0]
    [experience] = outcome.experiences
    assert experience.reward == 0.5 and experience.metrics["actual_env_steps"] == 4
    shown = engine.tokenizer.decode(engine.prompts[-1])
    assert [word for word in ("Guess.", "A number!", "Higher.", "Lower.") if word in shown] == [
        *("Guess.", "A number!", "Higher.", "Lower.")
    ]
    assert int(experience.mask.sum()) == len("".join(replies)) + len(replies)  # with the end tokens


def test_replies_may_be_actions_as_json(url: str) -> None:
    outcome, engine = play(["7", '{"number": "7"}'], url=url)
    assert not outcome.failures, outcome.failures[0]
    assert outcome.experiences[0].reward == 1.0
    assert "no action: expected a JSON object" in engine.tokenizer.decode(engine.prompts[-1])


def test_what_is_wrong_is_said(url: str) -> None:
    with pytest.raises(ValueError, match=r"workflow_args of openenv_workflow: .*url"):
        play([], action="number")
    [failure] = play(["7"], url=url, action="number", observation="txt")[0].failures
    assert "'txt', which the server's observation has not: it has text" in failure.message

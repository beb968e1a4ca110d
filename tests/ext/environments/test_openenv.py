"""A server of OpenEnv, made with its own package, as a workflow and by a multi-turn scheduler."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.limits import HANG_S
from tests.model.fake import FakeEngine
from trireme.explorer.runner import Outcome, Runner, TimeLimit
from trireme.ext.multi_turn.scheduled import multi_turn_scheduler
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.task import Task
from trireme.workflows.plugins import load_plugins
from trireme.workflows.workflow import resolve

server = pytest.importorskip(
    "openenv.core.env_server", reason="make test-agents installs openenv-core"
)
types = pytest.importorskip(
    "openenv.core.env_server.types", reason="make test-agents installs openenv-core"
)


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
        thread.join(HANG_S)


def play(replies: list[str], times: int = 1, **options: Any) -> tuple[Outcome, FakeEngine]:
    return run(Task({"prompt": "7"}, workflow="openenv_workflow", workflow_args=options), replies)


def run(task: Task, replies: list[str], times: int = 1) -> tuple[Outcome, FakeEngine]:
    name = task.workflow or ""

    async def main() -> tuple[Outcome, FakeEngine]:
        engine = FakeEngine(replies)
        whole: Any = engine
        chat = ChatTokens(engine.tokenizer)

        def make(task: Task, key: tuple[Any, ...]) -> Model:
            return Model(whole, chat, key=key, max_model_len=4000)

        spec = resolve(name)
        assert spec.examine is not None
        spec.examine(task)
        runner = Runner(make, whole, limit=TimeLimit(HANG_S), max_retries=0)
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
    assert "'txt', which the server's observation does not have: it has text" in failure.message


def scheduled(url: str, replies: list[str], scheduler: str, **env: Any) -> tuple[Any, FakeEngine]:
    row = {"messages": [{"role": "user", "content": "Play"}], "env_config": {"base_url": url} | env}
    args = {"scheduler": scheduler, "max_turns": 3}
    task = Task(row, workflow="multi_turn_scheduler", workflow_args=args)
    outcome, engine = run(task, replies)
    assert not outcome.failures, outcome.failures[0]
    [experience] = outcome.experiences
    asyncio.run(multi_turn_scheduler.judge(task, [experience]))
    return experience, engine


def test_the_scheduler_plays_an_episode(url: str) -> None:
    replies = ['```json\n{"number": "3"}\n```', '{"number": "7"}']
    options = {"reset_kwargs": {"seed": 7}, "system_message": "Guess a number."}
    experience, engine = scheduled(url, replies, "openenv_scheduler", **options)
    assert experience.reward == 1.0
    infos = experience.info["rollout_infos"]
    assert (infos["step_rewards"], infos["gym_done"]) == ([0.0, 1.0], True)
    shown = engine.tokenizer.decode(engine.prompts[-1])
    assert "Guess a number." in shown and '{"text": "Higher."}' in shown and "Play" not in shown
    assert int(experience.mask.sum()) == len("".join(replies)) + len(replies)  # with the end tokens


def test_an_episode_ends_with_the_last_turn(url: str) -> None:
    replies = ['{"number": "a"}', '{"number": "1"}', '{"number": "9"}']
    experience, _ = scheduled(url, replies, "openenv_scheduler", reset_kwargs={"seed": 7})
    assert (experience.reward, experience.info["rollout_infos"]["gym_done"]) == (-0.5, False)


PLUGIN = """
import asyncio

from swift.rollout.multi_turn import OpenEnvScheduler, multi_turns


class Told(OpenEnvScheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._tries = {}

    async def on_trajectory_start(self, requests):
        from swift.rollout.multi_turn import Messages

        for req in requests:
            wrapper = self._create_env({**self.env_config_defaults, **req.data_dict["env_config"]})
            obs, metadata = await asyncio.to_thread(wrapper.reset)
            messages: Messages = [{"role": "user", "content": self.format_observation(obs)}]
            req.messages = messages
            self._envs[req.uuid], self._tries[req.uuid] = wrapper, 0
            self._total_rewards[req.uuid], self._step_rewards[req.uuid] = 0.0, []

    async def _close_and_remove(self, uuid):
        await super()._close_and_remove(uuid)
        self._tries.pop(uuid, None)

    async def on_turn_end(self, infer_request, response_choice, current_turn):
        uuid = infer_request.uuid
        action = self.parse_action(response_choice.message.content)
        obs, reward, done, metadata = await asyncio.to_thread(self._envs[uuid].step, action)
        self._tries[uuid] += 1
        self._total_rewards[uuid] = reward / self._tries[uuid]
        self._pending_obs[uuid] = None if done else self.format_observation(obs)
        infos = {"total_reward": self._total_rewards[uuid], "gym_done": done}
        if done:
            await self._close_and_remove(uuid)
        return {"done": done, "rollout_infos": infos}

    def parse_action(self, text):
        return {"number": text.split()[-1]}

    def format_observation(self, observation):
        return observation["text"]


multi_turns["told_scheduler"] = Told
"""


def test_a_plug_in_for_ms_swift_leads_the_episode(url: str, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(PLUGIN)
    load_plugins([tmp_path / "told.py"])
    replies = ["I say 3", "then 7"]
    experience, engine = scheduled(url, replies, "told_scheduler", reset_kwargs={"seed": 7})
    assert experience.reward == 0.5
    assert "Higher." in engine.tokenizer.decode(engine.prompts[-1])

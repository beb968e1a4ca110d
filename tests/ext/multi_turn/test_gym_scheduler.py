"""Gym scheduler: an environment's conversation and reward, and its close on every way out."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.ext.multi_turn.test_scheduler import run, trained
from tests.limits import HANG_S
from tests.model.fake import TOKENIZER, Say, engine_of, make, user
from trireme import ContextManager, Env, Experience, Task, context_managers, gym_envs
from trireme.ext.multi_turn.gym_scheduler import LARGEST_INFO, OpenEnvScheduler
from trireme.ext.multi_turn.scheduled import multi_turn_scheduler
from trireme.model.model import Model
from trireme.text import as_json

ROW = {"messages": [user("<placeholder>")], "env_config": {"name": "guess", "secret": "3"}}
CLOSED: list[Env] = []
MORE = " … (999,000 more characters)"


@pytest.fixture(autouse=True)
def none_closed() -> None:
    """A list of the test's own: a close that comes late is the last test's."""
    global CLOSED
    CLOSED = []


class Guess(Env):
    """A number is to be guessed; plain methods, which run in a thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.record = CLOSED

    def reset(self, config: Any) -> Any:
        self.thread = threading.current_thread()
        return "Guess.", {}, self.env_config.get("system", "")

    def step(self, action: list[dict[str, Any]]) -> Any:
        said = action[-1]["content"]
        if said == "break":
            raise RuntimeError("the environment broke")
        right = said == self.env_config["secret"]
        return "No.", 1.0 if right else -0.25, right, {}

    def close(self) -> None:
        self.record.append(self)


class AsyncGuess(Guess):
    async def reset(self, config: Any) -> Any:
        return super().reset(config)

    async def step(self, action: list[dict[str, Any]]) -> Any:
        return super().step(action)

    async def close(self) -> None:
        super().close()


class FiveValues(Guess):
    def step(self, action: list[dict[str, Any]]) -> Any:
        observation, reward, done, info = super().step(action)
        return observation, reward, done, action[-1]["content"] == "stop", info


class LastOnly(ContextManager):
    def manage_context(self, history: list[dict[str, Any]], trajectory_id: str) -> Any:
        return history[-int(self.ctx_config["keep"]) :]


gym_envs["guess"] = Guess
context_managers["last_only"] = LastOnly


def task_of(row: dict[str, Any] | None = None, **args: Any) -> Task:
    return Task(row or ROW, workflow_args={"scheduler": "gym_scheduler", "max_turns": 5, **args})


def play(replies: Any, env: Any = Guess, **args: Any) -> list[Experience]:
    row = {**ROW, "env_config": {"secret": "3"}}
    return run(
        replies if isinstance(replies, Model) else make(replies), task_of(row, env=env, **args)
    )


def closed() -> int:
    """How often an environment was closed; a plain close is not waited for."""
    until = time.monotonic() + HANG_S
    while not CLOSED and time.monotonic() < until:
        time.sleep(0.01)
    return len(CLOSED)


@pytest.mark.parametrize("env", [Guess, AsyncGuess])
def test_the_environments_reward_is_the_rollouts(env: type[Env]) -> None:
    [experience] = play(["1", "3"], env)
    assert experience.reward == 0.75
    infos = experience.info["rollout_infos"]
    rewards = {"total_reward": 0.75, "step_rewards": [-0.25, 1.0], "gym_done": True}
    assert infos == {**rewards, "num_turns": 2}
    assert experience.messages is not None
    assert [m["content"] for m in experience.messages] == ["Guess.", "1", "No.", "3"]
    assert trained(experience) == ["1<|im_end|>", "3<|im_end|>"]
    assert closed() == 1


def test_rewards_see_what_the_environment_says_of_each_step() -> None:
    class Says(Guess):
        def reset(self, config: Any) -> Any:
            return "Guess.", {"seed": np.int64(7), "map": np.eye(2)}, ""

        def step(self, action: list[dict[str, Any]]) -> Any:
            observation, reward, done, _ = super().step(action)
            itself: dict[str, Any] = {}
            itself["it"] = itself
            return observation, reward, done, {"status": "goal", "env": Env} if done else itself

    def reached(completions: list[str], rollout_infos: list[dict[str, Any]], **_: Any) -> Any:
        ends = [infos["trajectory_info"][-1] for infos in rollout_infos]
        return [float(end["status"] == "goal") for end in ends]

    task = replace(task_of({**ROW, "env_config": {"secret": "3"}}, env=Says), reward_fn=[reached])
    [experience] = run(make(["1", "3"]), task)
    first, second, last = experience.info["rollout_infos"]["trajectory_info"]
    assert first == {"seed": 7, "map": [[1.0, 0.0], [0.0, 1.0]]} and "..." in second
    assert last == {"status": "goal", "env": str(Env)}
    assert experience.reward == 0.75 + 1.0


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _deep(levels: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(levels):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    ("info", "kept"),
    [
        ({"log": "x" * 10**6, "won": True}, {"log": "x" * 1000 + MORE, "won": True}),
        (
            {"won": 1, "seen": [7] * 10**5},
            {"won": 1, "seen": "[" + "7, " * 333 + " … (299,000 more characters)"},
        ),
        ({"log": "z" * 9_000}, {"log": "z" * 9_000}),
        ({str(n): "v" * 900 for n in range(100)}, "{"),
        (
            {"raw": b"w" * 997 + b"w" * 10**5},
            {"raw": "b'" + "w" * 998 + " … (100,000 more characters)"},
        ),
        ({"n": 10**5000}, "<dict without a text: ValueError>"),
        ({"tree": _deep(10**5)}, "<dict without a text: RecursionError>"),
        ({"own": Broken()}, {"own": "<Broken without a text: RuntimeError>"}),
        ({"few": array("d", [1.0])}, {"few": "array('d', [1.0])"}),
    ],
)
def test_an_info_that_is_large_or_no_json_is_shortened_and_loses_no_rollout(
    info: Any, kept: Any
) -> None:
    """All of it was stored, in each sample, or the rollout failed."""

    class Says(Guess):
        def step(self, action: list[dict[str, Any]]) -> Any:
            return *super().step(action)[:3], info

    [experience] = play(["1", "3"], Says)
    assert experience.reward == 0.75
    for seen in experience.info["rollout_infos"]["trajectory_info"][1:]:
        assert len(as_json(seen)) <= LARGEST_INFO + 100
        if isinstance(kept, str):
            assert isinstance(seen, str) and seen.startswith(kept)
        else:
            assert seen == kept


class Session:
    """An episode of a server of OpenEnv."""

    def reset(self) -> Any:
        return "Guess.", {"seed": 7}

    def step(self, action: dict[str, Any]) -> Any:
        return "No.", 0.5, action["message"] == "3", {"tries": action["message"]}

    def close(self) -> None:
        pass


class OpenEpisode(OpenEnvScheduler):
    def _create_env(self, env_config: Any) -> Any:
        return Session()


def test_rewards_see_the_metadata_of_a_server() -> None:
    [experience] = run(make(["1", "3"]), task_of(scheduler=OpenEpisode))
    infos = experience.info["rollout_infos"]
    assert infos["trajectory_info"] == [{"seed": 7}, {"tries": "1"}, {"tries": "3"}]
    assert (infos["total_reward"], infos["step_rewards"]) == (1.0, [0.5, 0.5])


@pytest.mark.parametrize(("last", "total"), [("3", 0.75), ("stop", -0.5)])
def test_gymnasiums_five_values_end_an_episode_by_either(last: str, total: float) -> None:
    [experience] = play(["1", last, "2"], FiveValues)
    infos = experience.info["rollout_infos"]
    assert infos["gym_done"] and infos["num_turns"] == 2 and experience.reward == total


def test_the_row_names_its_environment_and_goes_over_the_configuration() -> None:
    task = task_of(env_config={"secret": "7", "system": "Be quick."})
    [experience] = run(make(["3"]), task)
    assert experience.reward == 1.0
    assert experience.messages is not None
    assert experience.messages[0] == {"role": "system", "content": "Be quick."}


def test_plain_methods_run_in_a_thread_of_their_own() -> None:
    play(["3"])
    assert closed() and getattr(CLOSED[0], "thread").name.startswith("gym-")  # noqa: B009


@pytest.mark.parametrize("env", [Guess, AsyncGuess])
def test_it_is_closed_where_max_turns_ends_it(env: type[Env]) -> None:
    [experience] = play(["1"] * 9, env, max_turns=2)
    assert experience.reward == -0.5 and not experience.info["rollout_infos"]["gym_done"]
    assert closed() == 1


@pytest.mark.parametrize("env", [Guess, AsyncGuess])
def test_it_is_closed_where_a_reply_was_cut(env: type[Env]) -> None:
    [experience] = play([Say("1", stop_reason="length")], env)
    assert experience.truncate_status == "response_truncated" and experience.reward == -0.25
    assert closed() == 1


@pytest.mark.parametrize("env", [Guess, AsyncGuess])
def test_it_is_closed_where_there_is_no_room(env: type[Env]) -> None:
    [experience] = play(make(["1"], max_model_len=40, max_prompt_tokens=3), env)
    assert experience.reward == 0 and experience.truncate_status == "prompt_truncated"
    assert experience.info["rollout_infos"]["step_rewards"] == []
    assert closed() == 1


@pytest.mark.parametrize("env", [Guess, AsyncGuess])
def test_it_is_closed_where_it_breaks(env: type[Env]) -> None:
    with pytest.raises(RuntimeError, match="the environment broke"):
        play(["break"], env)
    assert closed() == 1


@pytest.mark.parametrize("env", [Guess, AsyncGuess])
def test_it_is_closed_where_the_engine_breaks(env: type[Env]) -> None:
    def fail(prompt: str) -> str:
        raise RuntimeError("engine broke")

    with pytest.raises(RuntimeError, match="engine broke"):
        play(make(fail), env)
    assert closed() == 1


@pytest.mark.parametrize("env", [Guess, AsyncGuess])
def test_it_is_closed_where_the_rollout_is_cancelled(env: type[Env]) -> None:
    row = {**ROW, "env_config": {"secret": "3"}}

    async def main() -> None:
        model = make(["1"], wait=HANG_S)
        rollout = asyncio.ensure_future(multi_turn_scheduler(task_of(row, env=env), model))
        while not engine_of(model).prompts:
            await asyncio.sleep(0.01)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    asyncio.run(main())
    assert closed() == 1


def test_a_reset_that_hangs_ends_with_the_rollout_and_is_closed_when_it_returns() -> None:
    begun, over = threading.Event(), threading.Event()

    class Hangs(Guess):
        def reset(self, config: Any) -> Any:
            begun.set()
            over.wait(HANG_S)

    async def main() -> None:
        row = {**ROW, "env_config": {}}
        rollout = asyncio.ensure_future(multi_turn_scheduler(task_of(row, env=Hangs), make([])))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert not CLOSED
        over.set()

    asyncio.run(main())
    assert closed() == 1


def test_a_close_that_fails_costs_no_trajectory(caplog: pytest.LogCaptureFixture) -> None:
    class Leaks(AsyncGuess):
        async def close(self) -> None:
            raise RuntimeError("no")

    [experience] = play(["3"], Leaks)
    assert experience.reward == 1.0
    assert "Leaks.close failed" in caplog.text


def test_a_shortened_conversation_gives_a_sample_a_turn_also_where_prompts_are_equal() -> None:
    model = make(["1", "2", "3"])
    found = play(model, context_manager="last_only", ctx_config={"keep": 1})
    shown = [TOKENIZER.decode(prompt) for prompt in engine_of(model).prompts]
    assert shown[1] == shown[2] and "Guess." not in shown[1]
    assert [trained(e) for e in found] == [["1<|im_end|>"], ["2<|im_end|>"], ["3<|im_end|>"]]
    assert {e.reward for e in found} == {0.5}


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"env": "gues"}, "unknown environment 'gues'; did you mean 'guess'"),
        ({"context_manager": "last"}, "unknown context manager 'last'"),
    ],
)
def test_unknown_names_are_errors_before_the_run(args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        multi_turn_scheduler.examine(task_of(**args))


def test_a_row_without_an_environment_is_an_error() -> None:
    with pytest.raises(ValueError, match="gym_scheduler has no environment"):
        run(make(["1"]), task_of({"messages": [user("x")]}))


@pytest.mark.parametrize("method", ["reset", "step"])
def test_what_an_environment_may_not_return(method: str) -> None:
    wrong = type("Wrong", (Guess,), {method: lambda self, given: "text"})
    with pytest.raises(
        (TypeError, ValueError), match=rf"Wrong.{method} returned 'text': expected \(observation"
    ):
        play(["1"], wrong)


@pytest.mark.parametrize(
    ("method", "returned", "sentence"),
    [
        ("reset", (None, {}, ""), "Wrong.reset gave the observation None: expected text"),
        ("step", (None, 0.0, False, {}), "Wrong.step gave the observation None: expected text"),
        ("step", ("No.", None, False, {}), "Wrong.step gave the reward None: expected a number"),
        ("step", ("No.", 0.0, None, {}), "Wrong.step gave None as done: expected True or False"),
    ],
)
def test_what_a_model_would_read_as_none_and_a_forgotten_reward_are_refused(
    method: str, returned: Any, sentence: str
) -> None:
    wrong = type("Wrong", (Guess,), {method: lambda self, given: returned})
    with pytest.raises(ValueError, match=sentence):
        play(["1", "3"], wrong)

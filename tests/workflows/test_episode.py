"""Episodes over environments: one conversation or one experience a step, and how they end."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.workflows.test_workflow import call
from trireme import Experience
from trireme.envs.env import Seen, after_reset, after_step
from trireme.task import Task
from trireme.usercode import Refused, fault_of
from trireme.workflows.episode import EpisodeWorkflow
from trireme.workflows.workflow import resolve


class Door:
    """Opens at the third knock."""

    made: ClassVar[list[Door]] = []

    def __init__(self) -> None:
        self.knocks, self.closed, self.threads = 0, 0, {threading.get_ident()}
        type(self).made.append(self)

    def reset(self) -> str:
        self.threads.add(threading.get_ident())
        return "a door"

    def step(self, action: str) -> Any:
        self.threads.add(threading.get_ident())
        if action == "break":
            raise RuntimeError("the door broke")
        self.knocks += action == "knock"
        open_ = self.knocks == 3
        return "open" if open_ else "closed", float(open_), open_, {"env_state_hash": self.knocks}

    def close(self) -> None:
        self.closed += 1


class Knock(EpisodeWorkflow):
    max_env_steps = 4

    def make_env(self) -> Any:
        return Door()


class Inline(Knock):
    blocking_env = False
    per_step = True


class Coroutines(Knock):
    blocking_env = False

    async def make_env(self) -> Any:
        class AsyncDoor(Door):
            async def step(self, action: str) -> Any:
                return super().step(action)

        return AsyncDoor()


class ScoredAtTheEnd(Knock):
    def final_reward(self, seen: Seen, total: float) -> float:
        return total / 2


class AsksTheReward(Knock):
    def final_reward(self, seen: Seen, total: float) -> float:
        return total * (self.task.reward_fn is not None)


class RunsItself(Knock):
    async def run(self) -> Any:
        return []


class EnvironmentAsks(Knock):
    rewards_itself = False


@pytest.fixture(autouse=True)
def forget() -> None:
    Door.made.clear()


@pytest.mark.parametrize("cls", [Knock, Coroutines])
def test_an_episode_is_one_conversation(cls: type) -> None:
    (e,) = call(cls, ["knock", " knock", "knock"])
    assert e.reward == 1.0
    assert e.metrics["actual_env_steps"] == 3 and e.metrics["env_rounds"] == 2
    assert e.metrics["env_done"] == 1.0
    assert [m["content"] for m in e.messages or []][-2:] == ["closed", "knock"]


@pytest.mark.parametrize("cls", [Knock, Inline, ScoredAtTheEnd])
def test_a_reward_that_no_episode_asks_is_refused(cls: type) -> None:
    resolve(cls).refuse_unused(Task({"prompt": "1"}))
    with pytest.raises(ValueError, match=r"'math_reward', which .* set rewards_itself = False"):
        resolve(cls).refuse_unused(Task({"prompt": "1"}, reward_fn="math_reward"))


@pytest.mark.parametrize("cls", [AsksTheReward, RunsItself, EnvironmentAsks])
def test_a_class_that_may_ask_the_reward_is_not_refused(cls: type) -> None:
    resolve(cls).refuse_unused(Task({"prompt": "1"}, reward_fn="math_reward"))


def test_a_blocking_environment_has_one_thread_of_its_own() -> None:
    call(Knock, ["knock", "knock", "knock"])
    (door,) = Door.made
    assert len(door.threads) == 1 and threading.get_ident() not in door.threads


def test_per_step_gives_an_experience_for_each_with_what_it_earned() -> None:
    found = call(Inline, ["knock", "wait", "knock", "knock"])
    assert [e.reward for e in found] == [1.0] * 4
    assert [e.info["step_reward"] for e in found] == [0.0, 0.0, 0.0, 1.0]
    assert [e.info.get("env_state_hash") for e in found] == [None, 1, 1, 2]  # before each action
    assert Door.made[0].closed == 1


def test_an_episode_that_does_not_end_has_its_own_reward() -> None:
    (e,) = call(Knock, ["wait"] * 4)
    assert e.reward == -0.1 and e.metrics["env_done"] == 0.0


def test_an_environment_that_raises_fails_the_rollout_and_is_closed() -> None:
    with pytest.raises(RuntimeError, match="the door broke"):
        call(Inline, ["break"])
    assert Door.made[0].closed == 1


class Stuck(Door):
    def close(self) -> None:
        raise ConnectionError("closed already")


class StuckLater(Door):
    async def close(self) -> None:
        raise ConnectionError("closed already")


@pytest.mark.parametrize("door", [Stuck, StuckLater])
def test_an_error_of_close_is_logged_and_hides_nothing(
    door: type[Door], caplog: pytest.LogCaptureFixture
) -> None:
    class Open(Knock):
        blocking_env = False

        def make_env(self) -> Any:
            return door()

    assert call(Open, ["knock"] * 3)[0].reward == 1.0
    assert f"{door.__name__}.close failed" in caplog.text
    with pytest.raises(RuntimeError, match="the door broke"):
        call(Open, ["break"])


def test_an_episode_that_plays_and_closes_by_itself_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class ByItself(Knock):
        def make_env(self) -> Any:
            return Stuck()

        def generate_env_inference_samples(self, env: Any, rollout_num: int) -> list[Experience]:
            messages = [{"role": "user", "content": env.reset()}]
            text = self.get_model_response_text(messages)
            messages.append({"role": "assistant", "content": text})
            return [self.process_messages_to_experience(messages, env.step(text)[1])]

    assert call(ByItself, ["knock"])[0].reward == 0.0
    assert "Stuck.close failed" in caplog.text


def test_what_does_not_fit_ends_the_episode_and_is_counted() -> None:
    class Long(Inline):
        def format_observation(self, seen: Seen) -> str:
            return "x" * 30

    found = call(Long, ["wait"] * 4, max_model_len=100)
    assert found[0].metrics["env_no_room"] == 1.0 and len(found) < 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("s", 1, True, {"a": 1}), Seen("s", 1.0, True, {"a": 1})),
        (("s", 0.5, False, True, {}), Seen("s", 0.5, True, {})),
        (("s", True, False, None), Seen("s", 1.0, False, {})),
        (("s", np.array([0.5]), np.bool_(True), {}), Seen("s", 0.5, True, {})),
        (("s", torch.tensor(0.5), 0, {}), Seen("s", 0.5, False, {})),
    ],
)
def test_steps_of_four_and_five_values(given: Any, expected: Seen) -> None:
    assert after_step(given) == expected


def test_other_forms_are_named() -> None:
    with pytest.raises(Refused, match=r"expected \(observation, reward, done, info\)"):
        after_step("open")
    with pytest.raises(Refused, match=r"the environment's reset returned .*'You open doors.'\): "):
        after_reset(("s", {}, "You open doors."))
    assert after_reset((14, 10, 0)) == Seen((14, 10, 0))
    assert after_reset(("s", {"a": 1})) == Seen("s", info={"a": 1})
    assert after_reset("s") == Seen("s") and after_reset(("s", None)).info == {}


class Odd(Door):
    """Its methods return what they are told."""

    def __init__(self, begun: Any, transition: Any) -> None:
        super().__init__()
        self.begun, self.transition = begun, transition

    def reset(self) -> Any:
        return self.begun

    def step(self, action: str) -> Any:
        return self.transition


STEP, WHOLE = "step of the environment of Plays", "the environment of Plays"


@pytest.mark.parametrize(
    ("begun", "transition", "sentence"),
    [
        ("s", ("s", None, False, {}), f"{STEP} gave the reward None: expected a number, 0 where"),
        ("s", ("s", "1.0", False, {}), f"{STEP} gave the reward '1.0': expected a number"),
        ("s", ("s", [], False, {}), f"{STEP} gave the reward []: expected a number"),
        ("s", ("s", float("nan"), False, {}), f"{STEP} gave the reward nan: expected a finite"),
        ("s", ("s", False, 1.0, {}), f"{STEP} gave 1.0 as done: expected True or False"),
        ("s", ("s", 1.0, None, {}), f"{STEP} gave None as done: expected True or False"),
        ("s", ("s", 1.0, False, "no", {}), f"{STEP} gave 'no' as truncated: expected True or"),
        ("s", ("s", 1.0, False, ["x"]), f"{STEP} gave the info ['x']: expected a dict"),
        ("s", (None, 1.0, False, {}), f"{WHOLE} gave the observation None: expected text"),
        ("s", None, f"{STEP} returned None: expected (observation, reward, done, info), or"),
        (None, None, f"{WHOLE} gave the observation None: expected text"),
        (b"s", None, f"{WHOLE} gave the observation b's': expected text"),
        (("s", {}, "x"), None, f"reset of {WHOLE} returned ('s', {{}}, 'x'): expected an"),
    ],
)
def test_what_an_environment_may_not_give_is_said_with_its_line(
    begun: Any, transition: Any, sentence: str
) -> None:
    class Plays(EpisodeWorkflow):
        max_env_steps = 2

        def make_env(self) -> Any:
            return Odd(begun, transition)

    with pytest.raises(Refused) as caught:
        call(Plays, ["a", "b"])
    fault = fault_of(caught.value.with_traceback(None))  # which passed through the tests' own lines
    assert fault is not None and fault.lasting
    assert str(fault).startswith(sentence)
    assert "test_episode.py:" in fault.place


def test_an_observation_of_none_may_end_an_episode() -> None:
    class Ends(Knock):
        def make_env(self) -> Any:
            return Odd("s", (None, 1.0, True, None))

    assert call(Ends, ["a"])[0].reward == 1.0


def test_a_method_that_nobody_calls_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Steps(Knock):
        def step(self, step_num: int) -> bool:
            return False

    resolve(Steps)
    assert "Steps.step is never called: `run` is that of Knock" in caplog.text
    assert "generate_env_inference_samples" in caplog.text

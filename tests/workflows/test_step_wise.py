from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.workflows.test_workflow import call
from trireme import Experience, RewardPropagationWorkflow, StepWiseRewardWorkflow
from trireme.task import Task
from trireme.usercode import Refused
from trireme.workflows.episode import EpisodeWorkflow
from trireme.workflows.workflow import resolve


class Guess(RewardPropagationWorkflow):
    """The environment tells after each guess whether to go on."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.memory: list[dict[str, Any]] = []
        self.right = False
        self.closed = 0

    def step(self, step_num: int) -> bool:
        self.memory.append({"role": "user", "content": f"Guess {step_num}"})
        text = self.model.chat(self.memory)[0].response_text
        self.memory.append({"role": "assistant", "content": text})
        self.right = text == "7"
        return not self.right

    def reward(self, exps: list[Experience]) -> float:
        return 1.0 if self.right else -0.1

    @property
    def max_step_num(self) -> int:
        return 3


class GuessAsync(Guess):
    async def step(self, step_num: int) -> bool:
        self.memory.append({"role": "user", "content": f"Guess {step_num}"})
        text = (await self.model.chat_async(self.memory))[0].response_text
        self.memory.append({"role": "assistant", "content": text})
        self.right = text == "7"
        return not self.right


class GuessTwin(Guess):
    async def step_async(self, step_num: int) -> bool:
        return await GuessAsync.step(self, step_num)  # type: ignore[arg-type]

    async def reward_async(self, exps: list[Experience]) -> float:
        return super().reward(exps)


@pytest.mark.parametrize(
    ("cls", "blocks"), [(Guess, True), (GuessAsync, False), (GuessTwin, False)]
)
def test_every_step_is_an_experience_with_the_reward_of_the_end(cls: type, blocks: bool) -> None:
    assert resolve(cls).blocking == blocks
    found = call(cls, ["1", "7", "9"])
    assert [e.reward for e in found] == [1.0, 1.0]
    assert [e.eid.step for e in found] == [0, 1]
    assert [e.response_text for e in found] == ["1", "7"]
    assert all(e.metrics["actual_env_steps"] == 2.0 for e in found)
    first, second = found
    assert second.tokens[: len(first.tokens)].tolist() == first.tokens.tolist()
    assert int(second.mask.sum()) == int(first.mask.sum())  # only what its own step sampled


def test_a_first_step_that_returns_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Forgets(Guess):
        def step(self, step_num: int) -> bool:
            super().step(step_num)
            return None  # type: ignore[return-value]

    assert len(call(Forgets, ["1", "7"])) == 1
    assert len(call(Forgets, ["1", "7"])) == 1
    assert caplog.text.count("Forgets.step returned None after the first step, which ends") == 1


def test_an_episode_ends_at_the_last_step() -> None:
    found = call(Guess, ["1", "2", "3", "4"])
    assert len(found) == 3 and found[0].reward == -0.1


class Steps(StepWiseRewardWorkflow):
    def step(self, step_num: int) -> bool:
        self.model.chat([{"role": "user", "content": f"{step_num}"}])
        return step_num < 2

    def reward(self, exps: list[Experience], step_num: int) -> float:
        assert [e.response_text for e in exps] == [str(step_num)]
        return float(step_num)


class StepsAsync(Steps):
    async def reward(self, exps: list[Experience], step_num: int) -> float:
        return step_num + 0.5

    async def step(self, step_num: int) -> bool:
        await self.model.chat_async([{"role": "user", "content": f"{step_num}"}])
        return step_num < 2


def test_every_step_has_its_own_reward() -> None:
    found = call(Steps, ["0", "1", "2"])
    assert [e.reward for e in found] == [0.0, 1.0, 2.0]
    assert [e.info["step_reward"] for e in found] == [0.0, 1.0, 2.0]
    assert [e.reward for e in call(StepsAsync, ["0", "1", "2"])] == [0.5, 1.5, 2.5]


def test_a_step_that_calls_the_model_twice_counts_once_in_the_return() -> None:
    """`gigpo` sums `step_reward` over the run, and took that of such a step twice."""

    class Twice(StepWiseRewardWorkflow):
        def step(self, step_num: int) -> bool:
            for part in "ab":
                self.model.chat([{"role": "user", "content": f"{step_num}{part}"}])
            return step_num < 1

        def reward(self, exps: list[Experience], step_num: int) -> float:
            return step_num + 1.0

    found = call(Twice, ["1", "2", "3", "4"])
    assert [e.reward for e in found] == [1.0, 1.0, 2.0, 2.0]
    assert [e.info.get("step_reward") for e in found] == [None, 1.0, None, 2.0]


def test_a_step_whose_prompt_is_too_long_has_the_reward_too() -> None:
    """Its 0 was that of the last step, which `multi_step_grpo` and the metrics take for all."""

    def step(self: Any, step_num: int) -> bool:
        self.model.chat([{"role": "user", "content": "?" * (1 + 99 * step_num)}])
        return step_num < 1

    class AtEnd(RewardPropagationWorkflow):
        def reward(self, exps: list[Experience]) -> float:
            return 0.5

    class EachStep(StepWiseRewardWorkflow):
        def reward(self, exps: list[Experience], step_num: int) -> float:
            return 0.5 + step_num

    for cls, rewards in ((AtEnd, [0.5, 0.5]), (EachStep, [0.5, 1.5])):
        cls.step = step
        found = call(cls, ["1"], max_prompt_tokens=30)
        assert [e.truncate_status for e in found] == [None, "prompt_truncated"]
        assert [e.reward for e in found] == rewards


@pytest.mark.parametrize("half", [np.float32(0.5), np.array(0.5), torch.tensor(0.5)])
def test_a_steps_reward_may_be_a_number_of_numpy_or_torch(half: Any) -> None:
    class Numpy(Steps):
        def reward(self, exps: list[Experience], step_num: int) -> Any:
            return half if step_num < 2 else np.bool_(True)

    found = call(Numpy, ["0", "1", "2"])
    assert [e.reward for e in found] == [e.info["step_reward"] for e in found] == [0.5, 0.5, 1.0]
    assert all(type(e.info["step_reward"]) is float for e in found)


@pytest.mark.parametrize("wrong", [None, "1", {"right": 1.0}])
def test_a_reward_that_is_no_number_names_the_method_that_gave_it(wrong: Any) -> None:
    class Numbered(Steps):
        def reward(self, exps: list[Experience], step_num: int) -> Any:
            return wrong

    class AtEnd(RewardPropagationWorkflow):
        async def step_async(self, step_num: int) -> bool:
            await self.model.chat_async([{"role": "user", "content": "?"}])
            return False

        async def reward_async(self, exps: list[Experience]) -> Any:
            return wrong

    for kind, name in ((Numbered, "Numbered.reward"), (AtEnd, "AtEnd.reward_async")):
        with pytest.raises(Refused, match=rf"{name} gave {re.escape(repr(wrong))}: expected a num"):
            call(kind, ["0"])


class Silent(Steps):
    def step(self, step_num: int) -> bool:
        raise RuntimeError("the environment broke")


class Closes(Silent):
    closed = 0

    def close(self) -> None:
        type(self).closed += 1


def test_an_episode_that_breaks_is_closed() -> None:
    with pytest.raises(RuntimeError, match="environment broke"):
        call(Closes, [])
    assert Closes.closed == 1


def test_an_error_of_close_is_logged_and_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Unopened(Guess):
        def open(self) -> None:
            raise ConnectionError("the game server refused")

        def close(self) -> None:
            self.env.close()  # type: ignore[attr-defined]

    class ClosedTwice(GuessAsync):
        async def close(self) -> None:
            raise RuntimeError("closed already")

    with pytest.raises(ConnectionError, match="server refused"):
        call(Unopened, [])
    assert "Unopened.close failed" in caplog.text
    assert [e.reward for e in call(ClosedTwice, ["1", "7"])] == [1.0, 1.0]
    assert "ClosedTwice.close failed" in caplog.text


@pytest.mark.extension("openai")
def test_the_client_of_the_model_is_recorded() -> None:
    class ByClient(Steps):
        def step(self, step_num: int) -> bool:
            self.client.chat.completions.create(
                model=self.client.model_path, messages=[{"role": "user", "content": "a"}]
            )
            return step_num < 1

    assert [e.response_text for e in call(ByClient, ["0", "1"])] == ["0", "1"]


def test_the_length_of_an_episode_comes_from_the_yaml() -> None:
    class Endless(Steps):
        def step(self, step_num: int) -> bool:
            self.model.chat([{"role": "user", "content": f"{step_num}"}])
            return True

    assert Endless.max_step_num.fget(_with_args({"max_env_steps": 4})) == 4  # type: ignore[attr-defined]
    assert Endless.max_step_num.fget(_with_args({})) == 30  # type: ignore[attr-defined]


def _with_args(args: dict[str, Any]) -> Any:
    class Holder:
        workflow_args = args

    return Holder()


class Plays(EpisodeWorkflow):
    """Its loop over an environment is the base's."""


@pytest.mark.parametrize("workflow", [Steps, Guess, Plays])
def test_the_number_of_steps_is_checked_before_the_run(workflow: Any) -> None:
    spec = resolve(workflow)
    spec.refuse_unused(Task({"prompt": ""}, workflow_args={"max_env_steps": 3, "my_own": 0}))
    whole = "expected a whole number"
    wrongs = [(0, "is 0: expected at least 1"), ("x", f"is 'x': {whole}")]
    wrongs += [(math.inf, f"is inf: {whole}"), (math.nan, f"is nan: {whole}")]
    for wrong, says in wrongs:
        with pytest.raises(ValueError, match=rf"workflow_args: max_env_steps {says}"):
            spec.refuse_unused(Task({"prompt": ""}, workflow_args={"max_env_steps": wrong}))

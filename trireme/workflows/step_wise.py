"""Step-wise: every step of an episode is a separate experience, so that contexts may be long.

A step that extends the one before shares its prefix in training, so that nothing is computed twice.
`step` and `reward` (or `step_async`, `reward_async`) are plain methods or `async def`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from threading import Lock
from typing import Any
from weakref import WeakSet

from trireme.aio import at_once, call_user, is_async
from trireme.envs.env import errors_of_close_logged
from trireme.experience import EID, Experience
from trireme.model.blocking import BlockingModel
from trireme.rewards.reward import number
from trireme.task import Task
from trireme.workflows.classes import Workflow
from trireme.workflows.episode import Steps

logger = logging.getLogger(__name__)


_said: WeakSet[type] = WeakSet()
_saying = Lock()


def _warn_of_none(cls: type, step: str) -> None:
    """Warn once of a class whose first step returned None, which ends its episodes like False."""
    with _saying:  # the first steps of several rollouts end at once, in threads
        if cls in _said:
            return
        _said.add(cls)
    logger.warning(
        "%s.%s returned None after the first step, which ends the episode: expected True to go on, "
        "or False",
        *(cls.__name__, step),
    )


class _Episode(Workflow):
    """The loop over the steps, which both forms share."""

    calls = ("step", "reward", "step_async", "reward_async")
    loop_options: Mapping[str, Any] = {"max_env_steps": Steps}

    def __init__(
        self,
        *,
        task: Task,
        model: BlockingModel,
        auxiliary_models: Sequence[Any] | None = None,
        use_openai_client: bool = True,
    ) -> None:
        """`use_openai_client` has no effect: `client` is made on first use."""
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    def __init_subclass__(cls, **options: Any) -> None:
        """A class with any coroutine among its methods runs on the event loop."""
        super().__init_subclass__(**options)
        methods = [cls.method("step"), cls.method("reward"), cls.open, cls.close]
        if any(map(is_async, methods)):
            cls.is_async = True

    @classmethod
    def method(cls, name: str) -> Callable[..., Any]:
        """Return `name` or `<name>_async`, whichever the most derived class defines."""
        for owner in cls.__mro__:
            for spelled in (f"{name}_async", name):
                if spelled in vars(owner):
                    return getattr(cls, spelled)
        raise TypeError(f"{cls.__name__} has no method `{name}`")

    @cached_property
    def client(self) -> Any:
        """An OpenAI client of the rollout model; its replies are recorded."""
        return self._client(self.model)

    @property
    def max_step_num(self) -> int:
        """The most steps of an episode: `workflow_args.max_env_steps`, else 30."""
        return int(self.workflow_args.get("max_env_steps", 30))

    def step(self, step_num: int) -> bool:
        """Interact once with the environment, counted from 0. False ends the episode."""
        raise NotImplementedError(f"{type(self).__name__} must define `step(self, step_num)`")

    def open(self) -> None:
        """Make the resources that the episode needs. Called once, before the first step."""

    def close(self) -> None:
        """Release the episode's resources (such as an environment). Called once, however it
        ends; an error of it is logged.
        """

    def run(self) -> list[Experience]:
        """Run all steps, one after the other; each experience has its step's number."""
        return at_once(self.run_async())  # plain methods wait for nothing

    async def run_async(self) -> list[Experience]:
        """Run the steps if a method is a coroutine."""
        step = self.method("step")
        episode: list[Experience] = []
        try:
            await call_user(self.open)
            for number in range(self.max_step_num):
                goes_on = await call_user(partial(step, self, step_num=number))
                if goes_on is None and number == 0 and self.max_step_num > 1:
                    _warn_of_none(type(self), step.__name__)
                mine = self._recorded(number)
                await self._judge_step(mine, number)
                episode += mine
                if not goes_on:
                    break
            await self._judge_end(episode)
        finally:
            with errors_of_close_logged(self):
                await call_user(self.close)
        return episode

    def _recorded(self, number: int) -> list[Experience]:
        recorded = self.model.extract_experience_from_history()
        for experience in recorded:
            experience.eid = EID(step=number)
            experience.info["env_step"] = number
        return recorded

    def _number(self, reward: Any) -> float:
        """Return a reward that the user's method gave. Raises Refused if it is no number."""
        name = self.method("reward").__name__
        return number(reward, f"{type(self).__name__}.{name} gave")

    async def _judge_step(self, mine: list[Experience], number: int) -> None:
        """Set rewards of the step that has just ended."""

    async def _judge_end(self, episode: list[Experience]) -> None:
        """Set rewards after the last step."""


class StepWiseRewardWorkflow(_Episode):
    """A reward for every step separately. Define `step` and `reward`."""

    def reward(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of one step, which all of its experiences get."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `reward(self, exps, step_num)`"
        )

    async def _judge_step(self, mine: list[Experience], number: int) -> None:
        judge = partial(self.method("reward"), self, mine, step_num=number)
        _give(mine, self._number(await call_user(judge)))
        if mine:  # once in the return, however often the step called the model
            mine[-1].info["step_reward"] = mine[-1].reward


class RewardPropagationWorkflow(_Episode):
    """One reward when the episode has ended, for all of its steps. Define `step` and `reward`."""

    def reward(self, exps: list[Experience]) -> float:
        """Return the reward of the episode, from the experiences of all its steps."""
        raise NotImplementedError(f"{type(self).__name__} must define `reward(self, exps)`")

    async def _judge_end(self, episode: list[Experience]) -> None:
        steps = len({e.info["env_step"] for e in episode})
        reward = await call_user(self.method("reward"), self, episode)
        _give(episode, self._number(reward))
        for experience in episode:
            experience.metrics["actual_env_steps"] = float(steps)


def _give(experiences: Sequence[Experience], reward: float) -> None:
    for experience in experiences:
        experience.reward = reward

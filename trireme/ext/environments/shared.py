"""Shared: workflows over published environments: those of `verifiers`, and OpenEnv's servers.

- An environment of `verifiers` leads the conversation itself, and sets the reward: where it
  compares rollouts, once the last of a task has ended.
- A server of OpenEnv is called turn by turn, each episode over its own connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trireme.engines.engine import what_is_wrong
from trireme.envs.env import Seen, extra
from trireme.experience import Experience
from trireme.ext.environments.generated import VERIFIERS, Played, environment, score_together
from trireme.task import Task
from trireme.text import as_json
from trireme.workflows.classes import Workflow
from trireme.workflows.episode import EpisodeWorkflow, row_number

_unscored: WeakKeyDictionary[Experience, Played] = WeakKeyDictionary()
"""The rollouts that are scored with their groups, until they are, by each of their experiences."""


class VerifiersWorkflow(Workflow):
    """The rows are those of the environment: `path: verifiers:NAME?OPTIONS`.

    The conversation and the reward are the environment's; its single rewards become metrics.
    """

    workflow_options: Mapping[str, Any] | None = {}
    rewards_itself = True

    async def run(self) -> list[Experience]:
        """Let the environment call the model until it ends."""
        model = self.model.model
        model.keeps_sampling = True
        env = environment(self.raw_task["generated_by"])
        played = await env.play(self.raw_task, model.openai, model.model_path or "model", {})
        experiences = model.experiences(played.reward)
        for experience in experiences:
            experience.metrics.update(played.metrics)
            if played.unscored is not None:
                _unscored[experience] = played
        return experiences

    @classmethod
    async def judge(
        cls, task: Task, experiences: Sequence[Experience], models: Sequence[Any]
    ) -> None:
        """Have the environment score a task's rollouts together, if its rewards compare them."""
        rollouts: dict[int, list[Experience]] = {}
        for experience in sorted(experiences, key=lambda e: (e.eid.run, e.eid.step)):
            if experience in _unscored:
                rollouts.setdefault(experience.eid.run, []).append(experience)
        if not rollouts:
            return
        played = [_unscored.pop(mine[0]) for mine in rollouts.values()]
        for mine, score in zip(rollouts.values(), await score_together(played), strict=True):
            # a rollout whose only prompt was too long keeps its reward of 0
            waits = any(experience.reward is None for experience in mine)
            for experience in mine:
                experience.reward = score.reward if waits else experience.reward
                experience.metrics.update(score.metrics)

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for rows of anything else."""
        path = str(task.raw_task.get("generated_by", ""))
        if not path.startswith(VERIFIERS):
            raise ValueError(
                "verifiers_workflow needs a taskset of an environment: set its path to "
                f"{VERIFIERS}NAME?OPTIONS, {VERIFIERS}my_environment?split=train for example"
            )
        environment(path)


class Settings(BaseModel):
    """`workflow_args` of openenv_workflow."""

    model_config = ConfigDict(extra="forbid")

    url: str
    """The server's address, http://127.0.0.1:8000 for example."""
    action: str | None = None
    """The field of an action that a reply fills; not given: a reply is the action, as JSON."""
    observation: str | None = None
    """The field of an observation that is shown; not given: all of it, as JSON."""
    reset: dict[str, Any] = {}
    """Arguments of an episode's `reset`, besides `seed`, the task's."""
    per_step: bool = False
    """One experience a turn in place of one an episode."""
    max_env_steps: Annotated[int, Field(gt=0)] = 30
    """Most turns of an episode."""


class Remote:
    """One episode on a server of OpenEnv."""

    def __init__(self, settings: Settings, seed: int) -> None:
        client = extra("openenv.core.generic_client", "OpenEnv", "openenv").GenericEnvClient
        self._client = client(base_url=settings.url)
        self._settings, self._seed = settings, seed

    async def reset(self) -> tuple[str, dict[str, Any]]:
        """Return the first observation."""
        begun = await self._client.reset(**{"seed": self._seed, **self._settings.reset})
        return self._shown(begun.observation), {}

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Act. An invalid action changes nothing, and the observation says so."""
        if self._settings.action is not None:
            sent: Any = {self._settings.action: action}
        else:
            try:
                sent = json.loads(action)
            except (ValueError, RecursionError):
                sent = None
            if not isinstance(sent, dict):
                return "That is no action: expected a JSON object.", 0.0, False, {}
        seen = await self._client.step(sent)
        return self._shown(seen.observation), float(seen.reward or 0.0), bool(seen.done), {}

    async def close(self) -> None:
        """End the episode's connection."""
        await self._client.close()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        field = self._settings.observation
        if field is None:
            return as_json(observation)
        if field not in observation:
            raise ValueError(
                f"workflow_args.observation is '{field}', which the server's observation does "
                f"not have: it has {', '.join(observation)}"
            )
        return str(observation[field])


class OpenEnvWorkflow(EpisodeWorkflow):
    """An environment behind a server of OpenEnv; a reply is the action.

    The prompt column is the episode's seed; the reward is the sum of the environment's.
    """

    blocking_env = False

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a wrong option, a row without a seed, or if the package is not
        installed.
        """
        _settings(task)
        row_number(task)
        extra("openenv.core.generic_client", "OpenEnv", "openenv")

    def bind(self, task: Task) -> None:
        """Set the attributes that users' methods read from the task."""
        super().bind(task)
        settings = _settings(task)
        self.per_step, self.max_env_steps = settings.per_step, settings.max_env_steps

    def make_env(self) -> Remote:
        """Open the episode's own connection."""
        return Remote(_settings(self.task), row_number(self.task))

    def final_reward(self, seen: Seen, total: float) -> float:
        """Return the sum of all steps."""
        return total


def _settings(task: Task) -> Settings:
    try:
        return Settings.model_validate(dict(task.workflow_args))
    except ValidationError as error:
        told = what_is_wrong(error.errors())
        raise ValueError(f"workflow_args of openenv_workflow: {told}") from None

"""Gym workflow: episodes in any gymnasium environment with discrete or text actions.

`workflow_args`: env_id, env_args, actions (names), per_step. The prompt column is the episode's
seed. The reward is the sum of the environment's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.envs.env import Seen
from trireme.envs.gym import TextGym
from trireme.task import Task
from trireme.workflows.episode import EpisodeWorkflow, parse_action


class GymWorkflow(EpisodeWorkflow):
    """The action is what stands in <action>, or else the whole reply."""

    unfinished_reward = 0.0

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """See Workflow."""
        return {"gymnasium": "gymnasium"}

    def bind(self, task: Task) -> None:
        """Take the names that users' methods read from the task."""
        super().bind(task)
        self.per_step = bool(task.workflow_args.get("per_step", False))

    def make_env(self) -> Any:
        """The environment that the YAML names, at the task's seed."""
        args = self.workflow_args
        if "env_id" not in args:
            raise ValueError("gym_workflow needs workflow_args.env_id, FrozenLake-v1 for example")
        return TextGym(
            args["env_id"],
            seed=int(self.task_desc),
            actions=args.get("actions", ()),
            env_args=args.get("env_args"),
        )

    def parse_action(self, reply: str) -> str:
        """What stands in <action>, or else the whole reply."""
        return parse_action(reply) or reply.strip()

    def final_reward(self, seen: Seen, total: float) -> float:
        """The sum of all steps."""
        return total

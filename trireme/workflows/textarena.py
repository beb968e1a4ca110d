"""TextArena workflow: episodes in a textarena game for one player.

`workflow_args`: env_id, env_args, per_step. The prompt column is the episode's seed.
"""

from __future__ import annotations

from collections.abc import Mapping

from trireme.envs.textarena import ArenaGame
from trireme.task import Task
from trireme.workflows.gym import GymWorkflow


class TextArenaWorkflow(GymWorkflow):
    """The action is what stands in <action>, or else the whole reply."""

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """See Workflow."""
        return {"textarena": "textarena"}

    def make_env(self) -> ArenaGame:
        """The game that the YAML names, at the task's seed."""
        args = self.workflow_args
        if "env_id" not in args:
            raise ValueError(
                "textarena_workflow needs workflow_args.env_id, GuessTheNumber-v0 for example"
            )
        return ArenaGame(args["env_id"], seed=int(self.task_desc), env_args=args.get("env_args"))

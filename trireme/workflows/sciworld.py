"""SciWorld workflow: experiments of ScienceWorld as one conversation.

The prompt column is JSON, `{"task_name": "boil", "var_num": 0}`, or the row has columns of these
names. `workflow_args`: simplification (easy), max_env_steps, env_workers, env_timeout.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any

from trireme.envs.env import Seen
from trireme.envs.pool import shared_pool
from trireme.registry import workflow
from trireme.task import Task
from trireme.workflows.episode import EpisodeWorkflow, parse_action

SYSTEM_PROMPT = """You do an experiment in a house that you know only through text, one action at \
a time.

Before each action think briefly. Answer with your thoughts between <think> and </think> and one \
action between <action> and </action>. Nobody answers questions.

The actions:
look around | look at X | look in X | examine X | read X
open X | close X | activate X | deactivate X
pick up X | put down X | move X to Y | pour X into Y | dunk X into Y | mix X | eat X
use X | use X on Y | connect X to Y | disconnect X
go to (place) | teleport to (place)
focus on X    say that X is what the task asks for
inventory | task | wait | wait1

An example:
<think>The thermometer is in the kitchen.</think>
<action>teleport to kitchen</action>"""


@workflow("sciworld_workflow")
class SciWorldWorkflow(EpisodeWorkflow):
    """The reward is the best score of the episode, 0 to 1."""

    blocking_env = False  # the pool's calls are coroutines
    max_env_steps = 30
    default_system_prompt = SYSTEM_PROMPT

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """See Workflow."""
        return {"scienceworld": "ScienceWorld"}

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a row that names no experiment, and where there is no Java."""
        experiment_of(task)
        if shutil.which("java") is None:
            raise ValueError("sciworld_workflow needs a Java runtime: there is no program 'java'")

    def make_env(self) -> Any:
        """The experiment of the task, in a worker process."""
        args, experiment = self.workflow_args, experiment_of(self.task)
        pool = shared_pool(
            "trireme.envs.sciworld:Experiment",
            workers=int(args.get("env_workers", 2)),
            timeout_s=float(args.get("env_timeout", 120)),
        )
        return pool.lend(**experiment, simplification=str(args.get("simplification", "easy")))

    def parse_action(self, reply: str) -> str:
        """What stands in <action>."""
        return parse_action(reply)

    def final_reward(self, seen: Seen, total: float) -> float:
        """The best score, also of an experiment that is not finished."""
        return total


def experiment_of(task: Task) -> dict[str, Any]:
    """Task and variation of a row. Raises ValueError where it names none."""
    row: Any = task.raw_task
    if "task_name" not in row:
        try:
            row = json.loads(task.prompt)
        except (TypeError, ValueError):
            row = {}
    if not isinstance(row, Mapping) or "task_name" not in row:
        raise ValueError(
            f"the row's column '{task.prompt_key}' is {task.prompt!r:.60}: expected JSON like "
            '{"task_name": "boil", "var_num": 0}, or columns task_name and var_num'
        )
    return {"task_name": str(row["task_name"]), "var_num": int(row.get("var_num", 0))}

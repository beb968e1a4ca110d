"""SciWorld workflow: experiments of ScienceWorld as one conversation.

The prompt column is JSON, `{"task_name": "boil", "var_num": 0}`, or the row has columns of these
names. `workflow_args`: simplification (easy), max_env_steps, env_workers, env_timeout.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from trireme.envs.env import Seen
from trireme.ext.agents.command import options_of
from trireme.ext.environments.pool import shared_pool
from trireme.task import Task, as_text
from trireme.workflows.episode import EpisodeWorkflow

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


SIMPLER = ("easy", "teleportAction", "selfWateringFlowerPots", "openContainers", "openDoors",
           "noElectricalAction")  # fmt: skip
MOVES = 100
"""Most of ScienceWorld's own moves in one action: waiting takes several."""


class Settings(BaseModel):
    """`workflow_args`."""

    model_config = ConfigDict(extra="forbid")

    simplification: str = "easy"
    """ScienceWorld's simplifications: names with commas between them, or easy for all."""
    max_env_steps: Annotated[int, Field(gt=0)] = 30
    """Most actions of an episode."""
    env_workers: Annotated[int, Field(gt=0)] = 2
    """Worker processes, each with a Java program."""
    env_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that a worker may take to answer."""

    @field_validator("simplification")
    @classmethod
    def _known(cls, given: str) -> str:
        if unknown := set(filter(None, given.split(","))) - set(SIMPLER):
            raise ValueError(f"no simplification {min(unknown)!r}; expected {', '.join(SIMPLER)}")
        return given


class SciWorldWorkflow(EpisodeWorkflow):
    """The reward is the best score of the episode, 0 to 1."""

    blocking_env = False  # the pool's calls are coroutines
    max_env_steps = 30
    default_system_prompt = SYSTEM_PROMPT
    tagged_actions = True
    examines_rows = True

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """Name the package that the experiments need."""
        return {"scienceworld": "ScienceWorld"}

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for an option, a row without an experiment, or a missing Java."""
        options_of(task, Settings, "sciworld_workflow")
        experiment_of(task)
        if shutil.which("java") is None:
            raise ValueError("sciworld_workflow needs a Java runtime: there is no program 'java'")

    def make_env(self) -> Any:
        """Make the experiment of the task, in a worker process."""
        settings = options_of(self.task, Settings, "sciworld_workflow")
        pool = shared_pool(
            "trireme.ext.small_worlds.experiment:Experiment",
            workers=settings.env_workers,
            timeout_s=settings.env_timeout,
        )
        return pool.lend(
            **experiment_of(self.task),
            simplification=settings.simplification,
            max_steps=MOVES * settings.max_env_steps,
        )

    def final_reward(self, seen: Seen, total: float) -> float:
        """Return the best score, also of an unfinished experiment."""
        return total


def experiment_of(task: Task) -> dict[str, Any]:
    """Return task and variation of a row. Raises ValueError if it names none."""
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
    number = str(as_text(row.get("var_num", 0)))
    if not number.isdecimal():
        raise ValueError(f"the row's var_num is {row['var_num']!r:.60}: expected 0, 1, 2 ...")
    return {"task_name": str(row["task_name"]), "var_num": int(number)}

"""ALFWorld workflows: household tasks on the real engine, as one conversation or step by step.

`format.prompt_key` names the column with the game's file. The engine lives in worker processes
(`workflow_args`: env_workers, env_timeout), the rollouts of one game on one of them.
"""

from __future__ import annotations

from typing import Any

from trireme.envs.env import Seen
from trireme.envs.pool import shared_pool
from trireme.workflows.episode import EpisodeWorkflow, parse_action

SYSTEM_PROMPT = """You act in a house that you know only through text. Solve the task that you are \
given, one action at a time.

Before each action think briefly about what you know and what you need next. Answer with your \
thoughts between <think> and </think> and one action between <action> and </action>. Nobody \
answers questions.

The actions:
look
inventory
go to (receptacle)
open (receptacle)
close (receptacle)
take (object) from (receptacle)
move (object) to (receptacle)
examine (something)
use (object)
heat (object) with (receptacle)
clean (object) with (receptacle)
cool (object) with (receptacle)
slice (object) with (object)

An example:
<think>The mug may be in the cabinet, which is closed.</think>
<action>open cabinet 1</action>"""
TASK = "Your task is to:"
HINT = "That is not possible here. Use one of the actions, with names as they were shown."


def format_observation(observation: str) -> str:
    """The user's message of an observation, with a hint where the action did nothing."""
    text = f"Observation: {observation}"
    return f"{text}\n{HINT}" if "Nothing happens" in observation else text


class AlfworldWorkflow(EpisodeWorkflow):
    """One conversation, one experience. A task that is not done in time has reward -0.1."""

    task_said = ""

    blocking_env = False  # the pool's calls are coroutines
    max_env_steps = 30
    unfinished_reward = -0.1
    default_system_prompt = SYSTEM_PROMPT

    def make_env(self) -> Any:
        """The game of the task, in a worker process."""
        args = self.workflow_args
        pool = shared_pool(
            "trireme.envs.alfworld.game:Game",
            workers=int(args.get("env_workers", 2)),
            timeout_s=float(args.get("env_timeout", 120)),
        )
        return pool.lend(key=str(self.task_desc), game_file=str(self.task_desc))

    def format_observation(self, seen: Seen) -> str:
        """See the function of this name.

        `workflow_args`: `show_admissible` lists what is possible, `remind_task` says the task again
        with every later observation.
        """
        observation = str(seen.observation).strip()
        text = format_observation(observation)
        if TASK in observation:
            self.task_said = observation[observation.index(TASK) :]
        elif self.workflow_args.get("remind_task"):
            text += f"\n{self.task_said}"
        if self.workflow_args.get("show_admissible"):
            text += f"\nPossible: {', '.join(seen.info.get('admissible_commands', ()))}"
        return text

    def parse_action(self, reply: str) -> str:
        """See the function of this name."""
        return parse_action(reply)


class StepWiseAlfworldWorkflow(AlfworldWorkflow):
    """Every step an experience; all of an episode have the reward of its end."""

    per_step = True

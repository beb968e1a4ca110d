"""ALFWorld workflows: household tasks on the real engine, as one conversation or step by step.

`format.prompt_key` names the column with the game's file. The engine runs in worker processes
(`workflow_args`: env_workers, env_timeout), the rollouts of one game on one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt

from trireme.envs.env import Seen, after_step
from trireme.experience import Experience
from trireme.ext.alfworld.game import check_game
from trireme.ext.environments.pool import BlockingEnv, EnvPool, shared_pool
from trireme.task import Task
from trireme.workflows.episode import EpisodeWorkflow, Steps, parse_action
from trireme.workflows.step_wise import RewardPropagationWorkflow

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
OPTIONS = {
    **{"max_env_steps": Steps, "env_workers": Annotated[int, Ge(1)]},
    **{"env_timeout": Annotated[float, Gt(0)], "show_admissible": bool, "remind_task": bool},
}
TASK = "Your task is to:"
HINT = "That is not possible here. Use one of the actions, with names as they were shown."


def format_observation(observation: str) -> str:
    """Return the user's message for an observation, with a hint if the action had no effect."""
    text = f"Observation: {observation.strip()}"
    return f"{text}\n{HINT}" if "Nothing happens" in observation else text


def create_environment(
    game_file: str, workers: int = 2, timeout_s: float = 120, max_steps: int = 200
) -> BlockingEnv:
    """Make a game in a worker process, for code in another thread. The engine ends it after
    `max_steps` actions.
    """
    pool = _pool(workers, timeout_s)
    return pool.lend_blocking(key=game_file, game_file=game_file, max_steps=max_steps)


class AlfworldWorkflow(EpisodeWorkflow):
    """One conversation, one experience. A task that is not done in time has reward -0.1."""

    blocking_env = False  # the pool's calls are coroutines
    max_env_steps = 30
    unfinished_reward = -0.1
    default_system_prompt = SYSTEM_PROMPT
    tagged_actions = True
    examines_rows = True
    workflow_options: Mapping[str, Any] | None = OPTIONS

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """Name the packages that the games need."""
        return {"textworld": "ALFWorld", "alfworld": "ALFWorld"}

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a row without a game's file."""
        if cls.make_env is AlfworldWorkflow.make_env:
            check_game(str(task.prompt))

    def make_env(self) -> Any:
        """Make the game of the task, in a worker process."""
        pool, game = _pool(*_workers(self.workflow_args)), str(self.task_desc)
        # the engine's own end would count as that of the task, with a reward of 0
        return pool.lend(key=game, game_file=game, max_steps=self.max_env_steps + 1)

    def bind(self, task: Task) -> None:
        """Set the attributes that users' methods read from the task."""
        super().bind(task)
        self._shown = _Shown(task.workflow_args)

    def format_observation(self, seen: Seen) -> str:
        """Format an observation for the model, see `_Shown`."""
        return self._shown(str(seen.observation), seen.info)


class StepWiseAlfworldWorkflow(RewardPropagationWorkflow):
    """Every step an experience; all of an episode have the reward of its end."""

    examines_rows = True
    workflow_options: Mapping[str, Any] | None = OPTIONS
    rewards_itself = True

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """Name the packages that the games need."""
        return AlfworldWorkflow.needs(task)

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a row without a game's file."""
        if cls.open is StepWiseAlfworldWorkflow.open:
            check_game(str(task.prompt))

    def open(self) -> None:
        """Begin the game."""
        args = self.workflow_args
        most = self.max_step_num + 1  # the engine's own end would count as that of the task
        self.env = create_environment(str(self.task_desc), *_workers(args), most)
        self.observation, self._info = self.env.reset()
        self._shown = _Shown(args)
        self.memory: list[dict[str, Any]] = [
            {"role": "system", "content": self.system_prompt or SYSTEM_PROMPT}
        ]
        self.done, self.no_room, self.final_reward = False, False, -0.1
        self._rewards: list[float] = []

    def step(self, step_num: int) -> bool:
        """Perform one action."""
        shown = self._shown(str(self.observation), self._info)
        self.memory.append({"role": "user", "content": shown})
        [reply] = self.model.chat(self.memory)
        self.no_room = reply.truncate_status == "prompt_truncated"
        if self.no_room:
            return False
        text = reply.response_text or ""
        self.memory.append({"role": "assistant", "content": text})
        seen = after_step(self.env.step(parse_action(text)))
        self.observation, self._info, self.done = seen.observation, seen.info, seen.done
        self._rewards.append(seen.reward)
        if self.done:
            self.final_reward = seen.reward
        return not self.done

    def reward(self, exps: list[Experience]) -> float:
        """Return the last step's reward, or -0.1 if the task was not done in time."""
        return self.final_reward

    async def _judge_end(self, episode: list[Experience]) -> None:
        for experience, reward in zip(episode, self._rewards, strict=False):
            experience.info["step_reward"] = reward
        rounds = len({experience.info["env_step"] for experience in episode}) - 1
        for experience in episode:
            experience.metrics |= {
                "env_rounds": float(rounds),
                "env_done": float(self.done),
                "env_no_room": float(self.no_room),
            }
        await super()._judge_end(episode)

    def close(self) -> None:
        """Release the game."""
        if (env := getattr(self, "env", None)) is not None:
            env.close()


class _Shown:
    """The format in which the model sees an observation.

    `workflow_args`: `show_admissible` lists what is possible, `remind_task` repeats the task with
    every later observation.
    """

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._args, self._task_said = args, ""

    def __call__(self, observation: str, info: Mapping[str, Any]) -> str:
        observation = observation.strip()
        text = format_observation(observation)
        if TASK in observation:
            self._task_said = observation[observation.index(TASK) :]
        elif self._args.get("remind_task"):
            text += f"\n{self._task_said}"
        if self._args.get("show_admissible"):
            text += f"\nPossible: {', '.join(info.get('admissible_commands', ()))}"
        return text


def _workers(args: Mapping[str, Any]) -> tuple[int, float]:
    return int(args.get("env_workers", 2)), float(args.get("env_timeout", 120))


def _pool(workers: int, timeout_s: float) -> EnvPool:
    return shared_pool("trireme.ext.alfworld.game:Game", workers=workers, timeout_s=timeout_s)

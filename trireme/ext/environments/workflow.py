"""Gym: workflows over environments that set the reward themselves (gymnasium, sudoku, textarena).

The prompt column is the episode's seed (gym, textarena), the number of the layout (household) or of
the puzzle (sudoku); the reward is the sum of the environment's. A reasoning gym asks one question.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from trireme.config.options import Share
from trireme.envs.env import Seen
from trireme.ext.environments.generated import problems
from trireme.ext.environments.gyms import ArenaGame, TextGym
from trireme.ext.environments.household import Household, Layout
from trireme.ext.environments.sudoku import Grid, Sudoku, make_puzzle
from trireme.task import Task
from trireme.workflows.episode import EpisodeWorkflow, Steps, parse_action, row_number
from trireme.workflows.single_turn import THINK_ANSWER, SimpleWorkflow

_EPISODE = {"max_env_steps": Steps, "per_step": bool}
_MADE_BY_ID = {**_EPISODE, "env_id": str, "env_args": Mapping}
_log = logging.getLogger(__name__)
_said: set[tuple[str, str]] = set()
_tried: set[str] = set()
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class GymWorkflow(EpisodeWorkflow):
    """The action is the text in <action>, or else the whole reply.

    Any gymnasium environment with discrete or text actions. `workflow_args`: env_id, env_args,
    actions (names), per_step.
    """

    unfinished_reward = 0.0
    examines_rows = True
    workflow_options = _MADE_BY_ID | {"actions": list}

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """Name the package that the environments need."""
        return {"gymnasium": "gymnasium"}

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a row without a seed, and for an environment that cannot be
        made.
        """
        row_number(task)
        if cls.make_env is GymWorkflow.make_env:
            _try_once(_gym, task)

    def bind(self, task: Task) -> None:
        """Set the attributes that users' methods read from the task."""
        super().bind(task)
        self.per_step = bool(task.workflow_args.get("per_step", False))

    def make_env(self) -> Any:
        """Make the environment that the YAML names, at the task's seed."""
        return _gym(self.task)

    def parse_action(self, reply: str) -> str:
        """Return the content of <action>, or else the whole reply."""
        return parse_action(reply) or reply.strip()

    def final_reward(self, seen: Seen, total: float) -> float:
        """Return the sum of all steps."""
        return total


class FrozenLakeWorkflow(GymWorkflow):
    """The action is the text in <action>, or else the whole reply: left, down, right, up.

    Columns `size`, `p` and `seed` draw the lake (4, 0.8, the prompt's number). `workflow_args`:
    is_slippery, agent_max_steps (replies), env_max_steps (moves), per_step, and those columns for
    all rows.
    """

    reads_prompt = False
    examines_rows = True
    workflow_options = _EPISODE | {
        **{"is_slippery": bool, "agent_max_steps": Steps, "env_max_steps": Steps},
        **{"size": int, "p": Share, "seed": int},
    }

    def bind(self, task: Task) -> None:
        """Set the attributes that users' methods read from the task."""
        super().bind(task)
        self.max_env_steps = int(task.workflow_args.get("agent_max_steps", self.max_env_steps))

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a row that no lake can be drawn from."""
        if task.prompt is None and "seed" not in {**task.workflow_args, **task.raw_task}:
            raise ValueError(
                f"the row has no number to draw the lake from: expected the column 'seed' or "
                f"'{task.prompt_key}' (format.prompt_key). It has: {', '.join(task.raw_task)}"
            )
        _lake_of(task)

    def make_env(self) -> TextGym:
        """Make the lake of the row."""
        maps = importlib.import_module("gymnasium.envs.toy_text.frozen_lake")
        given = {**self.workflow_args, **self.task.raw_task}
        size, frozen, seed = _lake_of(self.task)
        lake: dict[str, Any] = {
            "desc": maps.generate_random_map(size, frozen, seed),
            "is_slippery": bool(given.get("is_slippery", False)),
            "render_mode": "ansi",
        }
        if (most := given.get("env_max_steps")) is not None:
            lake["max_episode_steps"] = int(most)
        actions = ("left", "down", "right", "up")
        return TextGym("FrozenLake-v1", seed=seed, actions=actions, env_args=lake)


class HouseholdWorkflow(EpisodeWorkflow):
    """`format.prompt_key` names the column with the layout's number.

    Episodes in the small text household, one experience a step.
    """

    per_step = True
    blocking_env = False
    max_env_steps = 10
    unfinished_reward = 0.0
    examines_rows = True
    workflow_options: Mapping[str, Any] | None = {"max_env_steps": Steps}

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a row without a layout's number."""
        row_number(task)

    def make_env(self) -> Household:
        """Make the household of the task's layout."""
        return Household(Layout.numbered(row_number(self.task)))


class SudokuWorkflow(GymWorkflow):
    """The action is the text in <action>, or else the whole reply.

    A puzzle is filled in, one move a turn. `workflow_args`: size (4 or 9), empty (cells), per_step.
    """

    examines_rows = True
    workflow_options = _EPISODE | {"size": int, "empty": Steps}

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a puzzle that cannot be made."""
        _puzzle(task)

    def make_env(self) -> Sudoku:
        """Make the puzzle of the task's number."""
        return Sudoku(_puzzle(self.task))


class TextArenaWorkflow(GymWorkflow):
    """The action is the text in <action>, or else the whole reply.

    A textarena game for one player. `workflow_args`: env_id, env_args, per_step.
    """

    examines_rows = True
    workflow_options = _MADE_BY_ID

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """Name the package that the games need."""
        return {"textarena": "textarena"}

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a row without a seed, and for a game that cannot be made."""
        row_number(task)
        if cls.make_env is TextArenaWorkflow.make_env:
            _try_once(_game, task)

    def make_env(self) -> ArenaGame:
        """Make the game that the YAML names, at the task's seed."""
        return _game(self.task)


class ReasoningGymWorkflow(SimpleWorkflow):
    """The answer is the text in the last <answer>; without one there is no answer.

    Many data sets give a part for a text that holds the answer somewhere, and a whole reply does.
    `workflow_args.run_answers` lets a data set run the model's answers as Python code.
    """

    default_system_prompt = THINK_ANSWER
    workflow_options: Mapping[str, Any] | None = {"run_answers": bool}
    rewards_itself = True

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """Name the package that the problems need."""
        return {"reasoning_gym": "reasoning-gym"}

    def reset(self, task: Task) -> None:
        """Switch to a task. Raises ValueError if its data set would run answers and may not."""
        super().reset(task)
        path = task.raw_task.get("generated_by")
        if path is None:
            raise ValueError(
                "reasoning_gym_workflow needs a taskset of reasoning-gym: set its path to "
                "reasoning_gym:leg_counting?size=500&seed=1, for example"
            )
        self._problems = problems(path)
        if self._problems.runs_answers and not task.workflow_args.get("run_answers"):
            raise ValueError(
                f"{path} scores an answer by running it as Python code: choose another data set, "
                "or set workflow_args.run_answers: true if code that a model writes may be run"
            )

    async def reward_fn(self, task: Task, answer: str) -> dict[str, float]:
        """Return the data set's score of the answer; 0 if it cannot read it."""
        answers = _ANSWER.findall(answer)
        said = answers[-1].strip() if answers else ""
        try:
            return {"score": await asyncio.to_thread(self._problems.score, said, task.raw_task)}
        except Exception as error:  # foreign code: some raise for an answer that is out of shape
            _say_unscored(str(task.raw_task["generated_by"]), type(error).__name__, str(error)[:80])
            return {"score": 0.0}


def _say_unscored(path: str, kind: str, error: str) -> None:
    """Warn once of each kind of error of a data set: one that raises for every answer would
    score 0 without end.
    """
    if (path, kind) not in _said:
        _said.add((path, kind))
        _log.warning(
            "%s: score_answer raised %s (%s) for an answer, which scores 0; so do all for which it "
            "does, without a further warning",
            *(path, kind, error),
        )


def _try_once(make: Callable[[Task], Any], task: Task) -> None:
    """Make a task's environment, unless one with its `workflow_args` was made before: only the seed
    differs.
    """
    args = f"{make.__name__} {task.workflow_args}"
    if args not in _tried:
        getattr(make(task), "close", lambda: None)()
        _tried.add(args)


def _env_id(task: Task, workflow: str, example: str) -> str:
    if "env_id" not in task.workflow_args:
        raise ValueError(f"{workflow} needs workflow_args.env_id, {example} for example")
    return task.workflow_args["env_id"]


def _lake_of(task: Task) -> tuple[int, float, int]:
    """Return size, share of frozen cells, and seed of a row's lake. Raises ValueError for values
    that no lake has; one is drawn again and again until there is a way over it.
    """
    given = {**task.workflow_args, **task.raw_task}
    size, frozen, seed = given.get("size", 4), given.get("p", 0.8), given.get("seed", task.prompt)
    try:
        lake = int(size), float(frozen), int(seed)
    except (TypeError, ValueError):
        raise ValueError(
            f"a lake of size {size!r:.60}, p {frozen!r:.60} and seed {seed!r:.60}: expected numbers"
        ) from None
    if lake[0] < 2 or not 0 < lake[1] <= 1:
        raise ValueError(
            f"a lake of size {size} whose cells are frozen with the probability p {frozen}: "
            "expected a size of at least 2, and a p above 0 and at most 1"
        )
    return lake


def _gym(task: Task) -> TextGym:
    return TextGym(
        _env_id(task, "gym_workflow", "FrozenLake-v1"),
        seed=row_number(task),
        actions=task.workflow_args.get("actions", ()),
        env_args=task.workflow_args.get("env_args"),
    )


def _game(task: Task) -> ArenaGame:
    return ArenaGame(
        _env_id(task, "textarena_workflow", "GuessTheNumber-v0"),
        seed=row_number(task),
        env_args=task.workflow_args.get("env_args"),
    )


def _puzzle(task: Task) -> Grid:
    options = {k: int(v) for k, v in task.workflow_args.items() if k in ("size", "empty")}
    return make_puzzle(row_number(task), **options)

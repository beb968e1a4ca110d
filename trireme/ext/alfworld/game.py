"""Game: one ALFWorld game on the real TextWorld engine, in a worker process of a pool.

TextWorld supports only one thread, overwrites `sys.argv`, and loads a copy of its planner (34 MB of
disk until the process ends) for every game: none of that belongs into the trainer's process. A
closed game leaves its copy to the next. Two caches make a repeated reset ten times and a step twice
as fast: parsed texts, and translated problems (the rollouts of a group play the same game). The
game's texts are the same with and without them, and a test verifies it.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from trireme.envs.env import extra

KEYS = ("pddl_domain", "grammar", "pddl_problem")

_idle: list[Any] = []
"""Planners that no game of this process uses."""
_lent: list[Any] = []
"""Planners of the game that is being made or reset."""


class Game:
    """A game: `reset` and `step` return text, the reward is 1 when the task is done, else 0."""

    def __init__(
        self, game_file: str, *, expert: bool = False, max_steps: int = 200, caches: bool = True
    ) -> None:
        """`expert` adds the handcoded expert's next action to the info (`expert_plan`).

        Raises ValueError naming the file if it is not a game.
        """
        self.file = check_game(game_file)
        textworld, gym = engine("textworld"), engine("textworld.gym")
        alfred = engine("alfworld.agents.environment.alfred_tw_env")
        _install_planners()
        if caches:
            _install_caches()
        infos = textworld.EnvInfos(
            won=True, admissible_commands=True, extras=["expert_plan"] * expert
        )
        wrappers: list[Any] = [alfred.AlfredDemangler()]
        if expert:
            wrappers.append(_expert(alfred.AlfredExpert))
        name = gym.register_game(
            str(self.file), infos, max_episode_steps=max_steps, wrappers=wrappers
        )
        self._planners: list[Any] = []
        self._env = self._with_planners(lambda: gym.make(name))

    def reset(self) -> tuple[str, dict[str, Any]]:
        """Return the beginning: where the agent is, what it sees, what its task is."""
        observation, infos = self._with_planners(self._env.reset)
        return observation, _info(infos)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Perform an action. An impossible one returns "Nothing happens."."""
        observation, score, done, infos = self._env.step(action)
        return observation, float(score), bool(done), _info(infos)

    def close(self) -> None:
        """Release the engine; its planners serve the next game."""
        self._env.close()
        _idle.extend(self._planners)
        self._planners = []

    def _with_planners(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`; store the planners that it loads, and restore `sys.argv`."""
        argv = list(sys.argv)
        try:
            return call()
        finally:
            sys.argv = argv
            self._planners.extend(_lent)
            _lent.clear()


def engine(module: str) -> Any:
    """Import a module of ALFWorld or of its requirements."""
    return extra(module, "ALFWorld")


def _expert(base: Any) -> Any:
    """Return the handcoded expert. It counts the things that it carries by the older word `put`,
    which is `move` now: unchanged, it gets lost in tasks with two things.
    """

    class Expert(base):
        def _gather_infos(self) -> None:
            if self.prev_command.startswith("move "):
                self.prev_command = f"put {self.prev_command.removeprefix('move ')}"
            super()._gather_infos()

    return Expert()


def check_game(path: str) -> Path:
    """Return the file of a game, if it is one. Raises ValueError naming what is missing."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"game file {file}: there is no such file (column game_file of the data)")
    if file.suffix != ".tw-pddl":
        raise ValueError(f"game file {file}: expected a name that ends in .tw-pddl")
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"game file {file} is not JSON: {error}") from error
    missing = [key for key in KEYS if not isinstance(held, dict) or key not in held]
    if missing:
        raise ValueError(f"game file {file} lacks {', '.join(missing)}: it must contain {KEYS}")
    return file


def _info(infos: dict[str, Any]) -> dict[str, Any]:
    files = {
        "won": bool(infos.get("won")),
        "admissible_commands": list(infos.get("admissible_commands") or ()),
    }
    plan = infos.get("extra.expert_plan")
    return files | ({"expert_plan": list(plan)} if plan else {})


@lru_cache(maxsize=1)
def _install_planners() -> None:
    """Load a planner only if none is idle, in this process."""
    fast_downward = engine("fast_downward")
    load = fast_downward.load_lib

    def lend() -> Any:
        _lent.append(_idle.pop() if _idle else load())
        return _lent[-1]

    fast_downward.load_lib = lend


@lru_cache(maxsize=1)
def _install_caches() -> None:
    """Cache parsed texts and translated problems, in this process."""
    fast_downward, textgen = engine("fast_downward"), engine("textworld.envs.pddl.textgen")
    parse, translate = textgen._parse_and_convert, fast_downward.pddl2sas

    @lru_cache(maxsize=20_000)
    def parsed(text: str, **options: Any) -> Any:
        return parse(text, **options)

    def parse_copied(*args: Any, **options: Any) -> Any:
        if len(args) != 1 or not isinstance(args[0], str):
            return parse(*args, **options)
        value = parsed(args[0], **options)
        # code that derives a text changes the list of symbols, and sometimes a symbol
        return [copy.copy(item) for item in value] if isinstance(value, list) else copy.copy(value)

    textgen._parse_and_convert = parse_copied
    fast_downward.pddl2sas = lru_cache(maxsize=64)(translate)

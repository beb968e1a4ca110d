"""Experiment: ScienceWorld (arXiv:2203.07540) as text to read and text to act by.

Each world is a Java program: it needs `pip install scienceworld` and a Java runtime.
"""

from __future__ import annotations

from typing import Any

from trireme.envs.env import extra

_idle: list[Any] = []
"""Worlds that no experiment of this process uses: starting one takes two seconds."""


class Experiment:
    """An experiment of ScienceWorld: an episode's rewards sum up to its best score, 0 to 1."""

    def __init__(
        self, task_name: str, var_num: int = 0, simplification: str = "easy", max_steps: int = 100
    ) -> None:
        """Raises ValueError for an unknown task or variation."""
        world = extra("scienceworld", "ScienceWorld").ScienceWorldEnv
        self._world = _idle.pop() if _idle else world("", envStepLimit=max_steps)
        self._world.envStepLimit = max_steps
        try:
            self._load(task_name, var_num, simplification)
        except ValueError:
            self.close()  # a wrong row is no reason to start Java again
            raise
        self._best = 0.0

    def _load(self, task_name: str, var_num: int, simplification: str) -> None:
        names = self._world.get_task_names()
        if task_name not in names:
            raise ValueError(f"ScienceWorld has no task '{task_name}': it has {', '.join(names)}")
        count = self._world.get_max_variations(task_name)
        if not 0 <= var_num < count:
            raise ValueError(f"var_num is {var_num}: '{task_name}' has 0 to {count - 1}")
        self._world.load(task_name, var_num, simplification, generateGoldPath=True)

    def reset(self) -> tuple[str, dict[str, Any]]:
        """Return the task and the first observation."""
        observation, _ = self._world.reset()
        self._best = 0.0
        gold = list(self._world.get_gold_action_sequence())
        return f"{self._world.get_task_description()}\n{observation}", {"gold": gold}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Perform an action; the reward is the increase of the best score."""
        observation, _, done, info = self._world.step(action)
        score = float(info["score"]) / 100
        gained, self._best = max(score - self._best, 0.0), max(score, self._best)
        return str(observation), gained, bool(done), {"score": score}

    def close(self) -> None:
        """Leave the world to the next experiment."""
        _idle.append(self._world)

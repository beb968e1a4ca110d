"""Gym: a gymnasium environment as text to read and text to act by.

Discrete actions have names (`actions`), or are numbers. What is shown is the environment's own text
(`render_mode: ansi`), or its observation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trireme.envs.extras import extra


class TextGym:
    """`reset` and `step` with text. An action that does not exist brings a hint, not an error."""

    def __init__(
        self,
        env_id: str,
        *,
        seed: int,
        actions: Sequence[str] = (),
        env_args: Mapping[str, Any] | None = None,
    ) -> None:
        """`seed` is the episode's. Raises ModuleNotFoundError, and ValueError for other spaces."""
        gymnasium = extra("gymnasium", "gymnasium")
        self._env = gymnasium.make(env_id, **(env_args or {}))
        self._seed = seed
        size = int(getattr(self._env.action_space, "n", 0))
        text = type(self._env.action_space).__name__ == "Text"
        if not size and not text:
            raise ValueError(
                f"{env_id} has the action space {self._env.action_space}: expected Discrete or Text"
            )
        if size and actions and len(actions) != size:
            raise ValueError(f"{env_id} has {size} actions, and {len(actions)} names were given")
        self._names = (
            None if text else [a.lower() for a in actions] or [str(i) for i in range(size)]
        )

    def reset(self) -> tuple[str, dict[str, Any]]:
        """The beginning of the episode of this seed."""
        observation, info = self._env.reset(seed=self._seed)
        return self._shown(observation), dict(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act by name or number: the last one that the text names."""
        chosen: Any = action
        if self._names is not None:
            named = re.findall("|".join(map(re.escape, self._names)), action.lower())
            if not named:
                return (
                    f"Choose one of: {', '.join(self._names)}",
                    0.0,
                    False,
                    False,
                    {"valid": False},
                )
            chosen = self._names.index(named[-1])
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        return self._shown(observation), float(reward), terminated, truncated, dict(info)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _shown(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            return re.sub(r"\x1b\[[0-9;]*m(\w)\x1b\[0m", r"[\1]", str(self._env.render())).strip()
        return str(observation)

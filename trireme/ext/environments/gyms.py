"""Gyms: environments of other packages, as text to read and text to act by.

- gymnasium: discrete actions have names (`actions`), or are numbers. Observations are the
  environment's own text (`render_mode: ansi`), or its observation.
- textarena: a game for one player, in the form of reset and step.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from trireme.envs.env import extra


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
        """`seed` is the episode's. Raises ModuleNotFoundError, and ValueError for an
        environment that cannot be made, and for other spaces.
        """
        gymnasium = extra("gymnasium", "gymnasium")
        if wrong := [name for name in actions if not isinstance(name, str)]:
            raise ValueError(
                f"{env_id}: the action {wrong[0]!r} is no text: write its name in quotes"
            )
        try:
            self._env = gymnasium.make(env_id, **(env_args or {}))
        except (gymnasium.error.Error, TypeError) as error:
            raise ValueError(f"{env_id} cannot be made: {error}") from error
        self._seed = seed
        size = int(getattr(self._env.action_space, "n", 0))
        text = type(self._env.action_space).__name__ == "Text"
        if not size and not text:
            raise ValueError(
                f"{env_id} has the action space {self._env.action_space}: expected Discrete or Text"
            )
        if size and actions and len(actions) != size:
            raise ValueError(f"{env_id} has {size} actions, and {len(actions)} names were given")
        self._first = int(getattr(self._env.action_space, "start", 0))
        numbers = range(self._first, self._first + size)
        self._names = None if text else [a.lower() for a in actions] or list(map(str, numbers))
        longest_first = sorted(map(re.escape, self._names or ()), key=len, reverse=True)
        # ASCII: languages without spaces between words have names inside longer runs of letters
        self._named = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.ASCII)

    def reset(self) -> tuple[str, Any]:
        """Begin the episode of this seed."""
        observation, info = self._env.reset(seed=self._seed)
        return self._shown(observation), info

    def step(self, action: str) -> tuple[Any, ...]:
        """Act by name or number: the last one in the text, as a whole word."""
        chosen: Any = action
        if self._names is not None:
            named = self._named.findall(action.lower())
            if not named:
                return (
                    f"Choose one of: {', '.join(self._names)}",
                    0.0,
                    False,
                    False,
                    {"valid": False},
                )
            chosen = self._first + self._names.index(named[-1])
        observation, *others = self._env.step(chosen)  # examined by the workflow
        return self._shown(observation), *others

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _shown(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            return re.sub(r"\x1b\[[0-9;]*m(\w)\x1b\[0m", r"[\1]", str(self._env.render())).strip()
        return str(observation)


_DRAWING = Lock()


class ArenaGame:
    """One episode. Only new messages since the last turn are shown: the model has the rest
    already.
    """

    def __init__(
        self, env_id: str, *, seed: int, env_args: Mapping[str, Any] | None = None
    ) -> None:
        """Raises ModuleNotFoundError, and ValueError for an unknown game."""
        arena = extra("textarena", "textarena")
        # without textarena's own wrappers, which repeat the whole game every turn
        self._env = arena.make(env_id.removesuffix("-raw") + "-raw", **(env_args or {}))
        # its games draw from Python's one source of chance, which others use at the same time
        self._chance = random.Random(seed).getstate()
        self._seed = seed

    def reset(self) -> tuple[str, dict[str, Any]]:
        """Begin the episode of this seed."""
        self._drawn(lambda: self._env.reset(num_players=1, seed=self._seed))
        return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Pass the action on unchanged. The reward is given at the end, whatever the game
        reports.
        """
        done, _ = self._drawn(lambda: self._env.step(action))
        rewards, facts = self._env.close() if done else ({}, {})
        reward = (rewards or {}).get(0)
        # some games put the reason of a refusal in the reward's place
        reward = float(reward) if isinstance(reward, int | float) else 0.0
        return self._news(), reward, done, dict(facts.get(0, {}))

    def _news(self) -> str:
        """Return messages since the last call, without the player's own."""
        _, messages = self._env.get_observation()
        # some games give the arguments of a player's message in another order: no text in place two
        return "\n".join(
            text
            for sender, text, kind in messages
            if sender != 0 and isinstance(text, str) and kind.name != "PLAYER_ACTION"
        )

    def _drawn(self, act: Any) -> Any:
        """Call `act` with this game's own random state in place of Python's."""
        with _DRAWING:
            before = random.getstate()
            random.setstate(self._chance)
            try:
                return act()
            finally:
                self._chance = random.getstate()
                random.setstate(before)

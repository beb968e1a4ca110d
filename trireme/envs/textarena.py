"""TextArena: a game for one player of the package textarena, in the form of reset and step."""

from __future__ import annotations

import random
from collections.abc import Mapping
from threading import Lock
from typing import Any

from trireme.envs.extras import extra

_DRAWING = Lock()


class ArenaGame:
    """One episode. What is new since the last turn is shown: the model has the rest already."""

    def __init__(
        self, env_id: str, *, seed: int, env_args: Mapping[str, Any] | None = None
    ) -> None:
        """Raises ModuleNotFoundError, and ValueError for a game that there is not."""
        arena = extra("textarena", "textarena")
        # without textarena's own wrappers, which say the whole game again every turn
        self._env = arena.make(env_id.removesuffix("-raw") + "-raw", **(env_args or {}))
        # its games draw from Python's one source of chance, which others use at the same time
        self._chance = random.Random(seed).getstate()
        self._seed = seed

    def reset(self) -> tuple[str, dict[str, Any]]:
        """The beginning of the episode of this seed."""
        self._drawn(lambda: self._env.reset(num_players=1, seed=self._seed))
        return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """The game takes it as it is. The reward comes with the end, whatever the game gives."""
        done, _ = self._drawn(lambda: self._env.step(action))
        rewards, facts = self._env.close() if done else ({}, {})
        reward = (rewards or {}).get(0)
        # some games give the reason of a refusal in the reward's place
        reward = float(reward) if isinstance(reward, int | float) else 0.0
        return self._news(), reward, done, dict(facts.get(0, {}))

    def _news(self) -> str:
        """Messages since the last time, the player's own left out."""
        _, messages = self._env.get_observation()
        # some games give the arguments of a player's message in another order: no text in place two
        return "\n".join(
            text
            for sender, text, kind in messages
            if sender != 0 and isinstance(text, str) and kind.name != "PLAYER_ACTION"
        )

    def _drawn(self, act: Any) -> Any:
        """What `act` returns, this game's own source of chance in place of Python's."""
        with _DRAWING:
            before = random.getstate()
            random.setstate(self._chance)
            try:
                return act()
            finally:
                self._chance = random.getstate()
                random.setstate(before)

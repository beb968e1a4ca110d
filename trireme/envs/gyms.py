"""Gyms: environments of other packages, as text to read and text to act by.

- gymnasium: discrete actions have names (`actions`), or are numbers. What is shown is the
  environment's own text (`render_mode: ansi`), or its observation.
- textarena: a game for one player, in the form of reset and step.
- reasoning-gym: any of its data sets by name, made row by row.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import yaml

from trireme.envs.env import extra
from trireme.envs.verifiers import SCHEME as VERIFIERS
from trireme.envs.verifiers import Environment, environment
from trireme.registry import did_you_mean

COLUMNS = ("question", "answer", "metadata", "generated_by")
"""Of rows that are made."""
_SCHEME = "reasoning_gym:"


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
        """Messages since the last call, without the player's own."""
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


_RUNS = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\((?!entry)")


def generated(path: str) -> tuple[str, dict[str, Any]] | None:
    """Name and options of the generator; None for a path of any other kind."""
    if path.startswith(VERIFIERS):
        return path.removeprefix(VERIFIERS), {}  # the environment reads them itself
    if not path.startswith(_SCHEME):
        return None
    name, _, options = path.removeprefix(_SCHEME).partition("?")
    parts = [part.partition("=") for part in options.split("&") if part]
    return name, {"size": 500, "seed": 0} | {key: yaml.safe_load(text) for key, _, text in parts}


class Problems:
    """The rows of one data set, and what an answer to one is worth."""

    def __init__(self, path: str) -> None:
        """Raises ModuleNotFoundError, and ValueError for a name or option that there is not."""
        environment = generated(path)
        assert environment is not None
        name, options = environment
        factory = extra("reasoning_gym", "reasoning-gym").factory
        if name not in factory.DATASETS:
            hint = did_you_mean(name, factory.DATASETS, "did you mean '{}'?")
            hint = hint or ", ".join(sorted(factory.DATASETS))
            raise ValueError(f"reasoning-gym has no data set '{name}': {hint}")
        try:
            self._dataset = factory.create_dataset(name, **options)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"dataset '{path}' has wrong options: {error}") from error
        self._path = path
        self.runs_answers = bool(_RUNS.search(inspect.getsource(self._dataset.score_answer)))
        """Its score_answer gives the answer to Python's `eval`, or to sympy's parser: the same."""

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._dataset[index] | {"generated_by": self._path}

    def score(self, answer: str, row: dict[str, Any]) -> float:
        """From 0 to 1, by the data set's own `score_answer`."""
        return float(self._dataset.score_answer(answer, row))


@lru_cache(maxsize=64)
def problems(path: str) -> Problems:
    """The data set of `reasoning_gym:NAME?OPTIONS`, made once."""
    return Problems(path)


def made_rows(path: str) -> Problems | Environment:
    """The rows of a path that is `generated`."""
    return environment(path) if path.startswith(VERIFIERS) else problems(path)

"""Verifiers: the rows of an environment of the package `verifiers`, and rollouts in it.

The environment leads the conversation and gives the reward; it asks an OpenAI client, which is the
rollout's own. Its rows are those of `verifiers:NAME?OPTIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from trireme.envs.env import extra

SCHEME = "verifiers:"
EMPTY_REPLY = "EmptyModelResponseError"
"""The package's error for a reply without text; one to a prompt that is too long has none."""


@dataclass(frozen=True)
class Played:
    """What an environment says of one rollout."""

    reward: float
    metrics: dict[str, float]
    trace: list[Mapping[str, Any]]
    """Its own record, call by call, with the ids of `tokens`."""


class Environment:
    """One environment, loaded once."""

    def __init__(self, path: str) -> None:
        """Raises ModuleNotFoundError, and ValueError for what cannot be loaded or scored alone."""
        vf = extra("verifiers", "verifiers", "verifiers")
        name, _, text = path.removeprefix(SCHEME).partition("?")
        parts = [part.partition("=") for part in text.split("&") if part]
        options: dict[str, Any] = {key: yaml.safe_load(value) for key, _, value in parts}
        split = options.pop("split", "train")
        if split not in ("train", "eval"):
            raise ValueError(f"{path}: split is '{split}': expected train or eval")
        try:
            self._environment = vf.load_environment(name, **options)
        except Exception as error:  # the environment's own code
            raise ValueError(f"{path}: the environment cannot be loaded: {error}") from error
        together = self._environment.rubric._get_group_reward_funcs()
        if together:
            names = ", ".join(function.__name__ for function in together)
            raise ValueError(
                f"{path}: its rewards {names} judge several rollouts together, which is not "
                "served: take an environment whose rewards judge each alone"
            )
        eval_rows = self._environment.get_eval_dataset
        self._rows = self._environment.get_dataset() if split == "train" else eval_rows()
        self._path = path

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        users = [message["content"] for message in row["prompt"] if message["role"] == "user"]
        asked = {"question": users[-1] if users else "", "answer": row.get("answer", "")}
        return asked | {"metadata": row, "generated_by": self._path}

    async def play(
        self, row: Mapping[str, Any], client: Any, model: str, sampling: Mapping[str, Any]
    ) -> Played:
        """One rollout of a row. Raises RuntimeError where the environment ended it by an error.

        A model that says nothing ends the rollout, which has the environment's reward all the same.
        """
        clients = extra("verifiers.clients", "verifiers", "verifiers")
        ended = await self._environment.run_rollout(
            row["metadata"],
            clients.OpenAIChatCompletionsClient(client),
            model,
            {**sampling, "logprobs": True, "extra_body": {"return_token_ids": True}},
            state_columns=["trajectory"],
        )
        error = ended.get("error")
        if error is not None and error["error"] != EMPTY_REPLY:
            raise RuntimeError(f"{self._path} ended the rollout: {error!s:.300}")
        numbers = {k: float(v) for k, v in (ended.get("metrics") or {}).items()}
        return Played(float(ended["reward"] or 0.0), numbers, ended["trajectory"])


@lru_cache(maxsize=16)
def environment(path: str) -> Environment:
    """The environment of `verifiers:NAME?OPTIONS`."""
    return Environment(path)

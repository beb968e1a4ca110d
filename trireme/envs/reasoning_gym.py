"""Reasoning gym: any data set of the package reasoning-gym by its name, made row by row."""

from __future__ import annotations

import inspect
import re
from functools import lru_cache
from typing import Any

from trireme.config.generated import generated
from trireme.envs.extras import extra
from trireme.nearest import did_you_mean

_RUNS = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\((?!entry)")


class Problems:
    """The rows of one data set, and what an answer to one is worth."""

    def __init__(self, path: str) -> None:
        """Raises ModuleNotFoundError, and ValueError for a name or option that there is not."""
        found = generated(path)
        assert found is not None
        name, options = found
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

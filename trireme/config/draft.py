"""Draft: what the steps of deriving a Plan add to, notes and problems."""

from __future__ import annotations

from dataclasses import dataclass, field

from trireme.config.problem import Problem
from trireme.config.schema import Config


@dataclass
class Draft:
    """A stage's configuration, and what was found out about it so far."""

    config: Config
    problems: list[Problem]
    notes: list[str] = field(default_factory=list)

    def problem(self, key: str, text: str) -> None:
        """Notes what is wrong: the key's full name and a sentence that follows it."""
        self.problems.append(Problem(key, text))

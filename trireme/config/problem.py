"""Problem: what is wrong with a configuration, a sentence each, and the error that lists all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing to put right: the key's full name, and a sentence that follows it."""

    key: str
    text: str
    stage: str | None = None

    def __str__(self) -> str:
        where = f"stage {self.stage}: " if self.stage else ""
        return f"{where}{self.key} {self.text}" if self.key else f"{where}{self.text}"


class ConfigError(ValueError):
    """A configuration that cannot run; its text has one line a problem."""

    def __init__(self, problems: Iterable[Problem], source: str = "") -> None:
        self.problems: Sequence[Problem] = tuple(dict.fromkeys(problems))
        prefix = f"{source}: " if source else ""
        super().__init__("\n".join(f"{prefix}{problem}" for problem in self.problems))

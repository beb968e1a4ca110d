"""Config: the user's configuration (Config), the decisions derived from it (Plan), and its
problems.

The code that reads a YAML is imported on use: single files of this package also work without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from trireme.registry import lazy_names

if TYPE_CHECKING:
    from trireme.config.load import load_config
    from trireme.config.plan import Plan
    from trireme.config.schema import Config

_NAMES = {
    "Config": "trireme.config.schema",
    "Plan": "trireme.config.plan",
    "load_config": "trireme.config.load",
}
__all__ = ["ConfigError", "Findings", "Problem", *_NAMES]  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = lazy_names(__name__, _NAMES)

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """A problem to fix: the key's full name, and a sentence that follows it."""

    key: str
    text: str
    stage: str | None = None

    def __str__(self) -> str:
        where = f"stage {self.stage}: " if self.stage else ""
        return f"{where}{self.key} {self.text}" if self.key else f"{where}{self.text}"


@dataclass
class Findings:
    """The problems and notes that a check or a decision returns, in the order it found them.

    A function that decides something returns `(value, findings)`; its caller takes the value and
    adds the findings to its own.
    """

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes on settings that were mapped onto this machine, or that have no effect on it."""
    last_notes: list[str] = field(default_factory=list)
    """Notes on model and data, which are shown after all others."""

    def problem(self, key: str, text: str) -> None:
        """Add a problem: the key's full name, and a sentence that follows it."""
        self.problems.append(Problem(key, text))

    def note(self, text: str) -> None:
        """Add a line about something that does not keep the run from starting."""
        self.notes.append(text)

    def add(self, other: Findings) -> None:
        """Add the findings of a check."""
        self.problems += other.problems
        self.notes += other.notes
        self.last_notes += other.last_notes

    def take(self, decided: tuple[T, Findings]) -> T:
        """Add the findings of a decision, and return its value."""
        value, findings = decided
        self.add(findings)
        return value

    def shown_last(self) -> Findings:
        """Return the same findings, with all notes among the last."""
        return Findings(self.problems, [], [*self.notes, *self.last_notes])


class ConfigError(ValueError):
    """A configuration that cannot run; its text has one line a problem."""

    def __init__(self, problems: Iterable[Problem], source: str = "") -> None:
        self.problems: Sequence[Problem] = tuple(dict.fromkeys(problems))
        super().__init__(self.problems, source)
        self.source = source

    def __str__(self) -> str:
        prefix = f"{self.source}: " if self.source else ""
        return "\n".join(f"{prefix}{problem}" for problem in self.problems)

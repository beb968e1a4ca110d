"""Config: what the user wrote (Config), what follows from it (Plan), and what is wrong with it.

What reads a YAML is imported when it is used: single files of it serve where nothing does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
__all__ = ["ConfigError", "Problem", *_NAMES]  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = lazy_names(__name__, _NAMES)


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
        super().__init__(self.problems, source)
        self.source = source

    def __str__(self) -> str:
        prefix = f"{self.source}: " if self.source else ""
        return "\n".join(f"{prefix}{problem}" for problem in self.problems)

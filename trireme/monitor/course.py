"""Course: what the figures of one part came to, from the first steps of a run to the last ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

Figures = Mapping[str, float]
FEW = 3
"""Steps of which the beginning of a run is made, and the present."""
ROLLOUTS = 32
"""With fewer rollouts the present is made of more steps: chance is no cause."""
KEPT = 64
"""Steps that are remembered."""


@dataclass
class Course:
    """What the steps of one part came to so far."""

    step: int = 0
    first: list[Figures] = field(default_factory=list)
    rows: list[Figures] = field(default_factory=list)
    best: float = 0.0
    """The highest mean reward of a few steps."""
    ended: bool = False
    """No step will follow: what there is has to do."""

    def add(self, step: int, figures: Figures) -> None:
        """One step more."""
        self.step = step
        if len(self.first) < FEW:
            self.first.append(figures)
        self.rows = [*self.rows[1 - KEPT :], figures]
        rewards = values(self.rows[-FEW:], "rollout/reward/mean")
        if len(rewards) == FEW:
            self.best = max(self.best, fmean(rewards))

    @property
    def now(self) -> Sequence[Figures]:
        """The last steps: a few, and so many that they have some rollouts; none: too early."""
        for start in range(len(self.rows) - FEW, -1, -1):
            if self._rollouts(start) >= ROLLOUTS:
                return self.rows[start:]
        return self.rows if self.ended and self._rollouts(0) >= ROLLOUTS // 4 else ()

    @property
    def began(self) -> Sequence[Figures]:
        """The first steps, where the last ones are others."""
        return self.first if len(self.rows) >= len(self.now) + FEW else ()

    def _rollouts(self, start: int) -> float:
        counts = (row.get("rollout/runs", ROLLOUTS) for row in self.rows[start:])
        return sum(counts) + sum(values(self.rows[start:], "rollout/failed"))


def values(rows: Iterable[Figures], name: str) -> list[float]:
    """A figure in the steps that have it; files hold null where it is no finite number."""
    found = (row.get(name) for row in rows)
    return [value for value in found if value is not None and math.isfinite(value)]


def mean(rows: Iterable[Figures], name: str) -> float:
    """Over the steps that have it; 0 where none has."""
    found = values(rows, name)
    return fmean(found) if found else 0.0

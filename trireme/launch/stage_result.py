"""Stage result: what a stage came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trireme.explorer.explorer import Evaluation


@dataclass
class StageResult:
    """What a stage came to."""

    name: str | None
    mode: str
    schema: str
    first: Evaluation | None = None
    """Evaluation at the start, by taskset."""
    last: Evaluation | None = None
    """Evaluation at the end."""
    steps: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of exploring, training and evaluating."""
    model_dir: str | None = None
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """What the watchdog has seen."""

    def add(self, part: StageResult) -> None:
        """What one part of the run came to; of steps the last part's count."""
        self.first, self.last = part.first or self.first, part.last or self.last
        self.steps, self.phases = part.steps, self.phases | part.phases
        self.model_dir = part.model_dir or self.model_dir

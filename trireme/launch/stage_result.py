"""Stage result: what a stage came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trireme.explorer.explorer import Evaluation, Explorer
from trireme.trainer.trainer import Trainer

if TYPE_CHECKING:
    from trireme.launch.session import Session


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
    first_example: dict[str, Any] | None = None
    """The first held-out task in the evaluation at the start."""
    last_example: dict[str, Any] | None = None
    """The same one in the evaluation at the end."""
    steps: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of exploring, training and evaluating."""
    model_dir: str | None = None
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """What the watchdog has seen."""

    @classmethod
    def of(
        cls, session: Session, explorer: Explorer | None, trainer: Trainer | None
    ) -> StageResult:
        """What the parts of a session came to."""
        result = cls(session.plan.stage_name, session.plan.mode, session.recipe.schema)
        if explorer is not None:
            result.first = explorer.first_evaluation
            result.first_example = explorer.first_example
            if explorer.last_evaluation is not explorer.first_evaluation:
                result.last = explorer.last_evaluation
                result.last_example = explorer.last_example
            result.steps = explorer.step
            result.phases |= explorer.seconds
        if trainer is not None:
            result.steps = trainer.step
            result.phases["train"] = trainer.seconds
            result.model_dir = str(session.folder.hf_dir(trainer.step))
        return result

    def add(self, part: StageResult) -> None:
        """What one part of the run came to; of steps the last part's count."""
        self.first, self.last = part.first or self.first, part.last or self.last
        self.first_example = part.first_example or self.first_example
        self.last_example = part.last_example or self.last_example
        self.steps, self.phases = part.steps, self.phases | part.phases
        self.model_dir = part.model_dir or self.model_dir

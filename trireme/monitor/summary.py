"""Summary: what a whole run came to, for people (a table) and programs (`summary.json`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trireme.files import write_json

FILE_NAME = "summary.json"


@dataclass
class Summary:
    """Figures of a run over all its stages. Accuracies are shares, 0 to 1; None: not measured, and
    not written.
    """

    accuracy_before: float | None = None
    """Of the model as it was given."""
    accuracy_sft: float | None = None
    """After the supervised stage."""
    accuracy_rl: float | None = None
    """After the reinforcement stage."""
    accuracy_more_sft: float | None = None
    """What the reinforcement stage's wall time of more supervised training would have reached."""
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each stage (`run` where there are none) the first and last evaluation, by taskset."""
    steps: dict[str, int] = field(default_factory=dict)
    """The step that each stage has come to."""
    wall_s: float = 0.0
    """Seconds from start to end."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, in the order in which they ran."""
    model_dir: str | None = None
    """The folder of the trained model; None where none was saved."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """What the watchdog has seen: stage, cause, step, and the text with what to do."""
    next_command: str | None = None
    """What to try next."""

    def write(self, folder: str | Path) -> Path:
        """Write `<folder>/summary.json`, whole or not at all."""
        path = Path(folder) / FILE_NAME
        write_json(path, {key: value for key, value in asdict(self).items() if value is not None})
        return path

    @classmethod
    def read(cls, folder: str | Path) -> Summary:
        """The summary that `write` left in a folder."""
        return cls(**json.loads((Path(folder) / FILE_NAME).read_text(encoding="utf-8")))

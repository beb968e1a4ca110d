"""TensorBoard: the metrics as curves, one run folder for the explorer and one for the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

# The explorer is who evaluates: its curves and the evaluation's belong side by side.
_FOLDER = {"eval": "explorer"}


class TensorBoardMonitor:
    """Writes event files that `tensorboard --logdir` reads."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """All metrics of a step; on disk when this returns."""
        name = _FOLDER.get(part, part)
        if name not in self._writers:
            self._writers[name] = SummaryWriter(str(self.folder / name))
        writer = self._writers[name]
        for tag, value in metrics.items():
            writer.add_scalar(tag, float(value), step)
        writer.flush()

    def close(self) -> None:
        """End the writers' threads and close their files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

"""TensorBoard: the metrics as curves, one run folder for the explorer and one for the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from trireme.registry import tracker

# The explorer is who evaluates: its curves and the evaluation's belong side by side.
_FOLDER = {"eval": "explorer", "bench": "explorer"}


@tracker("tensorboard")
class TensorBoardMonitor:
    """Writes event files that `tensorboard --logdir` reads."""

    def __init__(self, folder: str | Path, keep_until: Mapping[str, int] | None = None) -> None:
        """`keep_until`: what an earlier start drew of a part after this step is no longer shown."""
        self.folder = Path(folder)
        self._keep_until = dict(keep_until or {})
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """All metrics of a step; on disk when this returns."""
        name = _FOLDER.get(part, part)
        if name not in self._writers:
            last = self._keep_until.get(name)
            # 0: nothing was there, or all that was there is of a run that begins anew
            purge = None if last is None else last + 1 if last else 0
            there = (self.folder / name).exists()
            self._writers[name] = SummaryWriter(
                str(self.folder / name), purge_step=purge if there else None
            )
        writer = self._writers[name]
        for tag, value in metrics.items():
            writer.add_scalar(tag, float(value), step)
        writer.flush()

    def close(self) -> None:
        """End the writers' threads and close their files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

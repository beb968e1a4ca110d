"""Copies: makes what people read besides the store: raw experiences, evaluations, failures, a data
set's rows and trained tokens; a listener writes their lines.
"""

from __future__ import annotations

from trireme.buffer.lines import data_lines
from trireme.buffer.record import Record, record_for
from trireme.buffer.store import copy_limits
from trireme.buffer.table import resolve_url
from trireme.buffer.trained import TrainedTokens
from trireme.checkpoint.layout import DATA_ROWS, EVALUATED, FAILED, RAW_COPY, JobFolder
from trireme.config import Plan
from trireme.monitor.events import Ended, Evaluated, Event, Failures, Trained

FAILED_BYTES = 20e6
"""Size limit, in bytes, of the lines of failed rollouts, each of which has its traceback."""


class Copy:
    """Writes one kind of lines."""

    def __init__(self, file: str, record: Record) -> None:
        """`file` names the kind of lines."""
        self.name = f"the copy buffer/{file}"
        self._file, self._record = file, record

    def hear(self, event: Event) -> None:
        """Write the lines of an event."""
        match event:
            case Evaluated() if self._file == EVALUATED:
                self._record.write_soon(event.rollouts)
            case Failures() if self._file == FAILED:
                self._record.write_lines(event.lines)
            case Trained() if self._file == DATA_ROWS:
                self._record.write_lines(data_lines(event.step, event.experiences))
            case Ended():
                self._record.close()


def make_raw_record(plan: Plan, folder: JobFolder) -> Record | None:
    """Make the copy of what workflows return, if the YAML wants one."""
    pipeline = plan.config.data_processor.experience_pipeline
    if not pipeline.save_input:
        return None
    path = pipeline.input_save_path or RAW_COPY
    if path.endswith((".jsonl", ".json")):
        return record_for(path, folder.buffer, **copy_limits(plan))
    return Record(database=resolve_url(path, folder.buffer), **copy_limits(plan))


def make_shown_record(plan: Plan, folder: JobFolder, name: str, most: float) -> Record | None:
    """Make the readable copy of evaluations, failures or a data set's rows, if the YAML wants
    copies.

    Lines have no tokens: those of evaluations are in a database in the same folder.
    """
    if not plan.config.data_processor.experience_pipeline.save_input:
        return None
    limits = copy_limits(plan)
    lines = folder.buffer / name
    limits |= {"limit": min(limits["limit"], most)}
    if name == EVALUATED:
        database = f"sqlite:///{lines.with_suffix('.db')}"
        return Record(database=database, lines=lines, messages=True, **limits)
    return Record(lines=lines, **limits)


def make_trained_tokens(plan: Plan, folder: JobFolder) -> TrainedTokens | None:
    """Make the copy of what train steps compute per token, if the YAML wants copies."""
    if not plan.config.data_processor.experience_pipeline.save_input:
        return None
    return TrainedTokens(folder.buffer, copy_limits(plan)["limit"])

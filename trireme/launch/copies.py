"""Copies: a listener that writes lines for people: evaluations, failures, a data set's rows."""

from __future__ import annotations

from trireme.buffer.lines import data_lines
from trireme.buffer.record import Record
from trireme.checkpoint.layout import DATA_ROWS, EVALUATED, FAILED
from trireme.monitor.events import Ended, Evaluated, Event, Failures, Trained


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

"""Notebook: shows a run in one output of a cell, which is updated in place.

The run's thread writes lines; the cell's thread shows them, since only its output belongs to the
cell.
"""

from __future__ import annotations

import html
import io
import json
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, redirect_stderr
from importlib import import_module
from typing import Any

from trireme.monitor.console import Console
from trireme.monitor.figures import sparkline
from trireme.monitor.terminal import Terminal

WIDTH = 110
MOST_LINES = 60
MOST_BYTES = 16_000
"""The lines and the bytes that a saved notebook has of one run: the last ones."""
STYLE = "line-height: 1.3; font-family: monospace; white-space: pre-wrap; word-break: normal"


def in_notebook() -> bool:
    """Return True in a cell of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class CellConsole(Console):
    """The lines of a run and its warnings, with its progress as the last of them."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        output = Terminal(
            file=self._text, highlight=False, force_jupyter=False, color_system=None, width=WIDTH
        )
        super().__init__(live=False, output=output, every=1.0)
        self._errors = _Lines(self._text)
        self._progress = ""
        self._rollout = ""
        self._shown = ""
        self._handle: Any = None

    def progress(self, text: str) -> None:
        """Keep the newest line of progress."""
        self._progress = text
        if len(self._rewards) > 1:
            self._progress += f"\nreward {sparkline(list(self._rewards), width=60)}"

    def sample(self, text: str) -> None:
        """Keep the newest rollout, below the progress."""
        self._rollout = text

    def close(self) -> None:
        """Keep the last line of progress above what follows."""
        super().close()
        if self._progress:
            self.note(self._progress.partition("\n")[0])
        self._progress = self._rollout = ""

    def warnings(self) -> AbstractContextManager[Any]:
        """Take what is written to stderr in the meantime: a cell would show it as an output of its
        own.
        """
        return redirect_stderr(self._errors)

    def show(self) -> None:
        """Update the cell's output, if there is news. Called by the cell's thread."""
        last = filter(None, [*self._errors.begun(), self._progress, self._rollout])
        text = self._text.getvalue() + "\n".join(last)
        if text == self._shown:
            return
        display = import_module("IPython.display").display  # a notebook has it
        self._shown = text
        data = _newest(text.rstrip("\n").split("\n"))
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class _Lines(io.TextIOBase):
    """Passes whole lines on to a file; of one that was written over, as progress bars are, the
    last state.
    """

    def __init__(self, file: io.StringIO) -> None:
        self._file = file
        self._begun: dict[int, str] = {}

    def write(self, text: str) -> int:
        """Implement `TextIOBase.write`, for each thread on its own."""
        thread = threading.get_ident()
        *whole, begun = (self._begun.pop(thread, "") + text).split("\n")
        self._file.write("".join(f"{_last_state(line)}\n" for line in whole))
        if begun:
            self._begun[thread] = _last_state(begun)
        return len(text)

    def begun(self) -> list[str]:
        """Return the lines that have not ended."""
        return list(self._begun.values())


def _last_state(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _newest(lines: Sequence[str]) -> dict[str, str]:
    """Return the last lines as text and as HTML, as many as a saved notebook may have."""
    first = max(len(lines) - MOST_LINES, 0)
    while True:
        above = [f"({first} earlier lines)"] * (first > 0)
        text = "\n".join([*above, *lines[first:]])
        page = f'<pre style="{STYLE}">{html.escape(text)}</pre>'
        data = {"text/plain": text, "text/html": page}
        if len(json.dumps(data)) <= MOST_BYTES:
            return data
        if first == len(lines) - 1:
            return _newest([lines[-1][: len(lines[-1]) // 2]])
        first += 1

"""Notebook: shows a run in one output of a cell, which is updated in place.

The run's thread writes lines; the cell's thread shows them, since only its output belongs to the
cell.
"""

from __future__ import annotations

import html
import io
import sys
from importlib import import_module
from typing import Any

from trireme.monitor.console import Console
from trireme.monitor.figures import sparkline
from trireme.monitor.terminal import Terminal

WIDTH = 110
MOST_CHARACTERS = 8000
"""The characters of the lines that are shown: the last ones."""
STYLE = "max-height: 32em; overflow: auto; line-height: 1.3"


def in_notebook() -> bool:
    """Return True in a cell of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class CellConsole(Console):
    """The lines of a run, with its progress as the last of them."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        output = Terminal(
            file=self._text, highlight=False, force_jupyter=False, color_system=None, width=WIDTH
        )
        super().__init__(live=False, output=output, every=1.0)
        self._progress = ""
        self._shown = ""
        self._handle: Any = None

    def progress(self, text: str) -> None:
        """Keep the newest line of progress."""
        self._progress = text
        if len(self._rewards) > 1:
            self._progress += f"\nreward {sparkline(list(self._rewards), width=60)}"

    def close(self) -> None:
        """Keep the last line of progress above what follows."""
        if self._progress:
            self.note(self._progress.partition("\n")[0])
            self._progress = ""

    def show(self) -> None:
        """Update the cell's output, if there is news. Called by the cell's thread."""
        text = self._text.getvalue()[-MOST_CHARACTERS:] + self._progress
        if text == self._shown:
            return
        display = import_module("IPython.display").display  # a notebook has it
        self._shown = text
        page = f'<pre style="{STYLE}">{html.escape(text)}</pre>'
        data = {"text/plain": text, "text/html": page}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

"""Search: finds a text in the prompts and replies of a run's lines, reading each line once per
text.

Invariants:
- A search stores one byte per rollout, whether it has the text; for the last few texts.
- For an ASCII text, bytes are compared. Other letters have a case too, which only decoded text
  shows: each line is then decoded, which takes about three times as long.
- Lines are only ever appended: a verdict stays true, and only new lines are read.
"""

from __future__ import annotations

import json
import mmap
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trireme.text import as_json

Selection = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Columns = dict[str, np.ndarray[Any, Any]]

CHUNK = 2**24
"""Bytes that a search reads at once."""
TEXTS = 16
"""Texts whose verdicts are cached."""
FEW = 0.05
"""The share of all rollouts below which reading them one by one is faster than reading the whole
file."""
PROMPT_KEY, REPLY_KEY = b'"prompt": "', b'", "response": "'
UNREAD, HAS_NOT, HAS = -1, 0, 1


class Search:
    """The cache of which rows of an index contain which text."""

    def __init__(self, files: Sequence[Path], first: int) -> None:
        """`files` in the order of the column `kind`; `first` names the index that is searched."""
        self.first = first
        self._files = files
        self._lock = threading.Lock()
        self._verdicts: dict[str, np.ndarray[Any, np.dtype[np.int8]]] = {}

    def among(self, order: Selection, text: str, columns: Columns, count: int) -> Selection:
        """Return the first `count` rows of `order` that have a text, reading each line
        separately.
        """
        verdicts = self._of(text, len(columns["offset"]))
        found: list[int] = []
        with _Lines(self._files, columns, text) as lines:
            for row in order.tolist():
                if verdicts[row] == UNREAD:
                    verdicts[row] = lines.holds(row)
                if verdicts[row] == HAS:
                    found.append(row)
                    if len(found) == count:
                        break
        return np.array(found, np.int64)

    def all(self, keep: Mask, text: str, columns: Columns) -> Mask:
        """Return the mask of the rows in `keep` that contain the text; rows without a file never
        do.
        """
        verdicts = self._of(text, len(columns["offset"]))
        unread = keep & (verdicts == UNREAD) & (columns["offset"] >= 0)
        rows = np.flatnonzero(unread)
        if len(rows) <= FEW * len(keep):
            self.among(rows, text, columns, len(rows) + 1)
            return keep & (verdicts == HAS)
        for kind, path in enumerate(self._files):
            rows = np.flatnonzero((columns["kind"] == kind) & (columns["offset"] >= 0))
            if not len(rows) or not path.exists():
                continue
            starts = columns["offset"][rows]
            begins, ends = starts + columns["text"][rows], starts + columns["text_end"][rows]
            of_file = np.full(len(rows), HAS_NOT, np.int8)
            of_file[_lines_holding(path, text, starts, begins, ends)] = HAS
            verdicts[rows] = of_file  # at once: another thread may read them
        return keep & (verdicts == HAS)

    def _of(self, text: str, count: int) -> np.ndarray[Any, np.dtype[np.int8]]:
        """Return the verdicts on a text, one per row; several threads may write the same values."""
        with self._lock:
            known = self._verdicts.pop(text, np.zeros(0, np.int8))
            if len(known) < count:
                known = np.concatenate([known, np.full(count - len(known), UNREAD, np.int8)])
            self._verdicts[text] = known
            if len(self._verdicts) > TEXTS:
                del self._verdicts[next(iter(self._verdicts))]
            return known[:count]


class _Lines:
    def __init__(self, files: Sequence[Path], columns: Columns, text: str) -> None:
        self._files = files
        names = ("kind", "offset", "text", "text_end")
        self._kind, self._offset, self._begin, self._end = (columns[name] for name in names)
        self._text, self._needle = text, as_bytes(text)
        self._open: dict[int, mmap.mmap] = {}

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        for data in self._open.values():
            data.close()

    def holds(self, row: int) -> bool:
        """Return whether a row's prompt or reply contains the text."""
        offset = int(self._offset[row])
        part = self._data(int(self._kind[row]))[
            offset + int(self._begin[row]) : offset + int(self._end[row])
        ]
        if not self._text.isascii():
            return _says_in_any_case(part, self._text)
        low = part.lower()
        at = low.find(self._needle)
        if at < 0:
            return False
        return _lies_in_text(low, (0, len(low)), at, len(self._needle)) or _says(part, self._text)

    def _data(self, kind: int) -> mmap.mmap:
        if kind not in self._open:
            with self._files[kind].open("rb") as file:
                self._open[kind] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._open[kind]


def as_bytes(text: str) -> bytes:
    """Return a text in lower case, as it is written in a line of JSON."""
    return as_json(text)[1:-1].encode().lower()


def _lines_holding(
    path: Path, text: str, starts: Selection, begins: Selection, ends: Selection
) -> list[int]:
    """Return the lines of a file that contain `text` in prompt or reply, between `begins` and
    `ends`.
    """
    holding: list[int] = []
    needle = as_bytes(text)
    at_line, begin, end = starts.tolist(), begins.tolist(), ends.tolist()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if not text.isascii():
            spans = enumerate(zip(begin, end, strict=True))
            return [line for line, (a, b) in spans if _says_in_any_case(data[a:b], text)]
        first = 0
        while first < len(starts):
            base = at_line[first]
            last = max(bisect_left(at_line, base + CHUNK), first + 1)
            low = data[base : end[last - 1]].lower()
            line, at = first, low.find(needle)
            while at >= 0:
                position = base + at
                line = bisect_right(at_line, position, line, last) - 1
                if begin[line] <= position < end[line]:
                    text_span = (begin[line] - base, end[line] - base)
                    in_text = _lies_in_text(low, text_span, at, len(needle))
                    if in_text or _says(data[begin[line] : end[line]], text):
                        holding.append(line)
                    line += 1  # one is enough
                    at = low.find(needle, at_line[line] - base) if line < last else -1
                else:
                    at = low.find(needle, at + 1)
            first = last
    return holding


def _lies_in_text(low: bytes, part: tuple[int, int], at: int, size: int) -> bool:
    """Return whether a match is surely inside the prompt or the reply; parsing a line takes far
    longer.

    A quote inside a text is escaped, so the bytes of REPLY_KEY are never part of one. Characters
    right after a backslash may be part of an escape.
    """
    begin, end = part
    key = low.find(REPLY_KEY, begin, end)
    if key < 0 or not low.startswith(PROMPT_KEY, begin) or b"\\" in low[max(at - 6, 0) : at]:
        return False
    if at < key:
        return begin + len(PROMPT_KEY) <= at and at + size <= key
    return key + len(REPLY_KEY) <= at and at + size < end


def _says_in_any_case(part: bytes, text: str) -> bool:
    """Return `_says`, parsing the line only if its text can contain `text`."""
    needle = as_json(text)[1:-1].casefold()
    return needle in part.decode(errors="replace").casefold() and _says(part, text)


def _says(part: bytes, text: str) -> bool:
    """Return whether the prompt or the reply of a line's part contains `text`: its bytes may be in
    a key.
    """
    row = json.loads(part if part.startswith(b"{") else b"{" + part + b"}")
    wanted = text.casefold()
    return any(wanted in (row.get(key) or "").casefold() for key in ("prompt", "response"))

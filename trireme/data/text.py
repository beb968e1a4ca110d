"""Text: how rows of plain text become experiences for continued pre-training.

The column is `format.prompt_key`, else `text`, else `prompt`. Texts are laid end to end, an end of
sequence behind each, and cut into pieces of `max_model_len`: a piece may hold several texts, and a
text lie in several pieces. Every token of a piece is trained but its first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.data.formats import Columns, SftFormat
from trireme.data.rows import Rows
from trireme.experience import EID, Experience


class CptFormat(SftFormat):
    """Pieces of text to be learnt; an index is that of a piece."""

    def __init__(self, rows: Rows, tokenizer: Any, **options: Any) -> None:
        """See SftFormat."""
        super().__init__(rows, tokenizer, **options)
        self._ids: list[int] = []
        for row in self.rows:
            self._ids += self._tokenizer.encode(row[str(self._columns.prompt)])
            if self._end_ids and self._ids[-1:] != self._end_ids[:1]:
                self._ids.append(self._end_ids[0])
        self.counts["rows"] = len(self.rows)

    def __len__(self) -> int:
        """Number of pieces; the last may be shorter."""
        return -(-len(self._ids) // self._max_len)

    def __call__(self, index: int, *, eid: EID) -> Experience | None:
        """Piece `index`; None where it leaves nothing to predict."""
        ids = self._ids[index * self._max_len : (index + 1) * self._max_len]
        if len(ids) < 2:
            return None
        return Experience(ids, prompt_length=1, eid=eid, response_text=self._tokenizer.decode(ids))

    def _columns_of(self, rows: Rows) -> Columns:
        column = self._format.get("prompt_key", "prompt")
        if column == "prompt" and "text" in rows.columns:
            column = "text"
        rows.require(column, "format.prompt_key")
        return Columns(prompt=column)

    def _check(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError, naming the column, where a row holds no text."""
        text = row.get(str(self._columns.prompt))
        if not isinstance(text, str) or not text:
            raise ValueError(f"column '{self._columns.prompt}' holds {text!r:.60}: expected text")

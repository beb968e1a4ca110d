"""Text: how a row of plain text becomes an experience for continued pre-training.

The column is `format.prompt_key`, else `text`, else `prompt`. Every token is trained but the first,
and an end of sequence behind the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.data.formats import Columns, SftFormat
from trireme.data.rows import Rows
from trireme.experience import EID, Experience


class CptFormat(SftFormat):
    """Rows as experiences of nothing but text to be learnt."""

    def __call__(self, index: int, *, eid: EID) -> Experience | None:
        """Row `index`, cut at `max_model_len`; None where it leaves nothing to predict."""
        text = self.rows[index][str(self._columns.prompt)]
        self.counts["rows"] += 1
        ids = self._tokenizer.encode(text)
        if self._tokenizer.eos_token_id is not None and ids[-1:] != [self._tokenizer.eos_token_id]:
            ids.append(self._tokenizer.eos_token_id)
        if len(ids) < 2:
            self.counts["dropped"] += 1
            return None
        self.counts["cut"] += len(ids) > self._max_len
        return Experience(ids[: self._max_len], prompt_length=1, eid=eid, response_text=text)

    def _columns_of(self, rows: Rows) -> Columns:
        column = self._format.get("prompt_key", "prompt")
        if column == "prompt" and "text" in rows.columns:
            column = "text"
        rows.require(column, "format.prompt_key")
        return Columns(prompt=column)

    def _check(self, index: int, row: Mapping[str, Any]) -> None:
        """Raise ValueError, naming the row, where it is not what its columns promise."""
        text = row.get(str(self._columns.prompt))
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"{self.rows.source}, row {index}: column '{self._columns.prompt}' holds "
                f"{text!r:.60}: expected text"
            )

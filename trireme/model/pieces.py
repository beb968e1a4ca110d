"""Pieces: text of tokens as they come, in parts that may be shown at once and never taken back.

A character of several tokens comes whole. What could be the beginning of a barrier (a stop string,
or where tool calls begin) is held back, and behind one nothing more is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class Pieces:
    """One reply's. `decode` leaves out special tokens."""

    def __init__(self, decode: Decode, barriers: Sequence[str] = ()) -> None:
        self._decode = decode
        self._barriers = [barrier for barrier in barriers if barrier]
        self._ids: list[int] = []
        self._first = self._known = 0
        self._held = ""
        self._closed = False
        self.shown = ""
        """All that was given out."""

    def add(self, token: int) -> str:
        """What may be shown now that `token` is there; often nothing."""
        self._ids.append(token)
        if self._closed:
            return ""
        # from a few tokens back: what a token says may depend on the one before it
        before = self._decode(self._ids[self._first : self._known])
        text = self._decode(self._ids[self._first :])
        if text.endswith("\ufffd") or not text.startswith(before):
            return ""
        self._first, self._known = self._known, len(self._ids)
        self._held += text[len(before) :]
        places = [place for b in self._barriers if (place := self._held.find(b)) >= 0]
        self._closed = bool(places)
        count = min(places) if places else len(self._held) - self._beginning()
        piece, self._held = self._held[:count], self._held[count:]
        self.shown += piece
        return piece

    def rest(self, whole: str) -> str:
        """What of the whole text was not shown yet."""
        return whole[len(self.shown) :] if whole.startswith(self.shown) else ""

    def _beginning(self) -> int:
        """How many characters at the end could be the beginning of a barrier."""
        held = self._held
        sizes = (
            n for b in self._barriers for n in range(len(b) - 1, 0, -1) if held.endswith(b[:n])
        )
        return max(sizes, default=0)

"""Prefix cache: keys and values of finished requests, for prompts that begin like them.

Entries belong to one weight version: the engine clears the cache with every new one. Bounded in
tokens; the least recently used entry goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

BLOCK = 16


@dataclass
class Entry:
    """One parked sequence."""

    ids: tuple[int, ...]
    saved: list[Tensor]
    blocks: list[int]


class PrefixCache:
    """Finds the entry that shares the longest beginning, in steps of BLOCK tokens to find it."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._by_block: dict[int, int] = {}
        self._tokens = 0
        self._next = 0

    def find(self, ids: Sequence[int]) -> tuple[list[Tensor] | None, int]:
        """Saved tensors, and how many leading tokens of `ids` they serve (never all of them)."""
        number = None
        for block in reversed(_chain(ids)):
            if block in self._by_block:
                number = self._by_block[block]
                break
        if number is None:
            return None, 0
        entry = self._entries[number]
        self._entries.move_to_end(number)
        common = 0
        for a, b in zip(entry.ids, ids[:-1], strict=False):
            if a != b:
                break
            common += 1
        return (entry.saved, common) if common else (None, 0)

    def add(self, ids: Sequence[int], saved: list[Tensor]) -> None:
        """Keep a sequence; `saved` covers all of `ids`."""
        blocks = _chain(ids)
        if not blocks or len(ids) > self.max_tokens:
            return
        self._entries[self._next] = Entry(tuple(ids), saved, blocks)
        for block in blocks:
            self._by_block[block] = self._next
        self._next += 1
        self._tokens += len(ids)
        while self._tokens > self.max_tokens:
            self._drop_oldest()

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._by_block.clear()
        self._tokens = 0

    def _drop_oldest(self) -> None:
        number, entry = self._entries.popitem(last=False)
        self._tokens -= len(entry.ids)
        for block in entry.blocks:
            if self._by_block.get(block) == number:
                del self._by_block[block]


def _chain(ids: Sequence[int]) -> list[int]:
    """A hash of each beginning of whole blocks."""
    out, last = [], 0
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        last = hash((last, tuple(ids[start : start + BLOCK])))
        out.append(last)
    return out

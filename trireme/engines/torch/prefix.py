"""Prefix cache: keys and values of finished requests, for prompts that begin like them; and the
prompts that several running requests share.

Entries belong to one weight version: the engine clears the cache with every new one. Bounded in
tokens; the least recently used entry goes first. Entries that were saved together, or begin with
one saved prompt, share memory, which counts until the last of them goes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trireme.engines.request import Request
from trireme.engines.torch.rows import RowStore, SavedRow, SavedRows

BLOCK = 16
SHARES = 16
"""Copies of rows of at least this number have room in the cache."""
CANDIDATES = 32
"""Entries with the same beginning that are compared token by token, newest first."""


@dataclass
class ParkedSequence:
    """One parked sequence."""

    ids: tuple[int, ...]
    saved: SavedRow
    blocks: list[int]


class PrefixCache:
    """Finds the entry with the longest common prefix, in steps of BLOCK tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._entries: OrderedDict[int, ParkedSequence] = OrderedDict()
        self._by_block: dict[int, list[int]] = {}
        self._users: Counter[SavedRows] = Counter()
        """The number of entries that need each copy."""
        self._tokens = 0
        """The memory of all copies, in tokens of keys and values."""
        self._next = 0

    def wants(self, length: int) -> bool:
        """Return whether a sequence of so many tokens can be found at all."""
        return BLOCK <= length <= self.max_tokens

    def copies(
        self, store: RowStore, rows: Sequence[int], lengths: Sequence[int]
    ) -> list[SavedRow]:
        """Copy the first tokens of some rows, several together as far as that keeps to a part of
        the cache: an entry that is used keeps the memory of those that were copied with it.
        """
        longest, out = max(lengths, default=0), []
        size = max(1, self.max_tokens // (SHARES * max(longest, 1)))
        for begin in range(0, len(rows), size):
            end = begin + size
            out += store.save(rows[begin:end], lengths[begin:end])
        return out

    def find(self, ids: Sequence[int], *, whole: bool = False) -> tuple[SavedRow | None, int]:
        """Return a saved row, and the number of leading tokens of `ids` that it serves (never all).

        `whole`: only one whose tokens are all leading tokens of `ids`, since its states are those
        after its last token.
        """
        for block in reversed(_chain(ids)):
            numbers = self._by_block.get(block, [])[-CANDIDATES:]
            lengths = {n: _common(self._entries[n].ids, ids) for n in numbers}
            if whole:
                lengths = {n: k for n, k in lengths.items() if k == len(self._entries[n].ids)}
            if lengths:
                best = max(lengths, key=lambda n: lengths[n])
                self._entries.move_to_end(best)
                return self._entries[best].saved, lengths[best]
        return None, 0

    def add(self, ids: Sequence[int], saved: SavedRow) -> None:
        """Store a sequence; `saved` covers all of `ids`."""
        copies = [part.rows for part in saved.parts]
        if not self.wants(len(ids)) or sum(copy.tokens for copy in copies) > self.max_tokens:
            return
        blocks = _chain(ids)
        self._entries[self._next] = ParkedSequence(tuple(ids), saved, blocks)
        for block in blocks:
            self._by_block.setdefault(block, []).append(self._next)
        self._next += 1
        self._tokens += sum(copy.tokens for copy in copies if not self._users[copy])
        self._users.update(copies)
        while self._tokens > self.max_tokens:
            self._drop_oldest()

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self._by_block.clear()
        self._users.clear()
        self._tokens = 0

    def _drop_oldest(self) -> None:
        number, entry = self._entries.popitem(last=False)
        for part in entry.saved.parts:
            self._users[part.rows] -= 1
            if not self._users[part.rows]:
                del self._users[part.rows]
                self._tokens -= part.rows.tokens
        for block in entry.blocks:
            self._by_block[block].remove(number)
            if not self._by_block[block]:
                del self._by_block[block]


class SharedPrompts:
    """Prompts that several running requests share: stored once, one slot each."""

    def __init__(self, max_tokens: int) -> None:
        self.store = RowStore(max_tokens)
        self._slots: dict[tuple[int, ...], int] = {}
        """Prompts computed with the current weights."""
        self._members: dict[int, int] = {}
        """The number of requests of each used slot."""
        self._lengths: dict[int, int] = {}
        """The tokens in each used slot."""
        self._saved: dict[int, SavedRow] = {}
        """Copies of used slots, for all members that end."""

    def saved(self, slots: Iterable[int], cache: PrefixCache) -> dict[int, SavedRow]:
        """Return copies of used slots, the same ones each time; `cache` makes them."""
        new = [slot for slot in dict.fromkeys(slots) if slot not in self._saved]
        copies = cache.copies(self.store, new, [self._lengths[slot] for slot in new])
        self._saved.update(zip(new, copies, strict=True))
        return self._saved

    def is_saved(self, slot: int) -> bool:
        """Return whether a used slot has a copy."""
        return slot in self._saved

    def slot(self, ids: tuple[int, ...]) -> int | None:
        """Return a prompt's slot; None if it has none."""
        return self._slots.get(ids)

    def add(self, ids: tuple[int, ...]) -> int:
        """Assign a slot to a prompt that is read next."""
        self.reserve(1, len(ids))
        slot = next(n for n in range(len(self._members) + 1) if n not in self._members)
        self._slots[ids] = slot
        self._members[slot], self._lengths[slot] = 0, len(ids)
        return slot

    def fits(self, count: int, length: int) -> bool:
        """Return whether there may be `count` more prompts of at most `length` tokens."""
        return self._needed(count) * self._longest(length) <= self.store.max_tokens

    def reserve(self, count: int, length: int) -> None:
        """Make room for `count` more prompts of at most `length` tokens. Growing copies the present
        ones, so some room is made ahead.
        """
        needed, have, longest = self._needed(count), self.store.num_rows, self._longest(length)
        ahead = 0 if needed <= have else have + have // 4
        self.store.fit(needed, longest)
        if ahead * longest <= self.store.max_tokens:
            needed = max(needed, ahead)
        self.store.reserve(needed, length)

    def _needed(self, count: int) -> int:
        """Return the number of slots with `count` more prompts, which take free ones first."""
        return max(max(self._members, default=-1) + 1, len(self._members) + count)

    def _longest(self, length: int) -> int:
        return max(length, *self._lengths.values()) if self._lengths else length

    def join(self, request: Request, slot: int, length: int) -> None:
        """Note that the request's first `length` tokens are in the slot."""
        self._members[slot] += 1
        request.slot, request.shared, request.cached = slot, length, length

    def leave(self, request: Request) -> None:
        """Remove a request from its slot; an unused slot becomes free."""
        if request.shared:
            self._members[request.slot] -= 1
            if not self._members[request.slot]:
                del self._members[request.slot], self._lengths[request.slot]
                self._saved.pop(request.slot, None)
                self._slots = {ids: n for ids, n in self._slots.items() if n != request.slot}
            request.slot = request.shared = 0

    def forget(self) -> None:
        """Let no request join the present prompts: they were computed with other weights."""
        self._slots.clear()

    def clear(self) -> None:
        """Free the memory."""
        self.store.clear()
        self._slots.clear()
        self._members.clear()
        self._lengths.clear()
        self._saved.clear()


def _common(kept: Sequence[int], ids: Sequence[int]) -> int:
    """Count the equal leading tokens, without the last of `ids`."""
    most = min(len(kept), len(ids) - 1)
    if tuple(kept[:most]) == tuple(ids[:most]):  # usually a later turn
        return most
    return next(n for n in range(most) if kept[n] != ids[n])


def _chain(ids: Sequence[int]) -> list[int]:
    """Return a hash of each prefix of whole blocks."""
    out, last = [], 0
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        last = hash((last, tuple(ids[start : start + BLOCK])))
        out.append(last)
    return out

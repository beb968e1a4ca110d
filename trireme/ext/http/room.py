"""Room: limits the values in a request's body, counted in its bytes before they become objects.

A value of two bytes on the wire takes a hundred in memory, and an object of three takes a
microsecond wherever it is checked: a limit in bytes bounds neither. Values outside of texts are
counted piece by piece, at the speed of a copy, so that a body is refused at its first value too
many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

PIECE = 2**18
"""Bytes that are scanned before other threads may run."""
MAX_BODY = 16 * 2**20
"""Bytes of any request, weights and pictures aside: one character beyond Latin-1 makes four of each
while they are read."""
PICTURES = "/engine/pictures"
PICTURE_BODY = 44 * 2**20
"""Bytes of a request with one picture: 32 MiB, the most of a file, in base64."""
BESIDE = 2**20
"""Bytes of a conversation's tools and options, in addition to those of its tokens."""
DEEPEST = 100
"""Lists and objects in each other; schemas of tools have some tens."""
CONVERSATIONS = ("chat/completions", "messages", "messages/count_tokens", "responses")
"""APIs below `/v1/` with one conversation in a request."""

_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


@dataclass(frozen=True)
class Room:
    """The limits of a body."""

    bytes: int
    values: int
    keys: int
    lists: int
    """Objects count, too."""


class NoRoom(ValueError):
    """A body exceeds its limits."""


def room_of(path: str, max_text: int) -> Room:
    """Return the limits of a route. `max_text`: characters of a conversation, see
    `Rollouts.max_text`.
    """
    if path.rpartition("/v1/")[2] in CONVERSATIONS:
        size = min(MAX_BODY, 4 * max_text + BESIDE)  # a character has up to four bytes
        return Room(size, values=2**16, keys=2**16, lists=2**15)
    if path == PICTURES:
        return Room(PICTURE_BODY, values=2**6, keys=2**6, lists=2**6)
    # of many prompts: `ext/remote/servers.py` sends 2**20 ids and 16,384 generations at most
    return Room(MAX_BODY, values=2**21, keys=2**19, lists=2**17)


def look_inside(body: bytes, room: Room) -> None:
    """Raise NoRoom for a body that exceeds its limits, or nests deeper; after anything that is not
    JSON the rest is not checked.
    """
    values, keys, lists, depth = 1, 0, 0, 0
    inside, rest = False, b""
    for start in range(0, len(body), PIECE):
        piece = rest + body[start : start + PIECE]
        # of backslashes at a border only the last may belong to the next piece
        run = len(piece) - len(piece.rstrip(b"\\"))
        rest = b"\\" if run % 2 else b""
        piece = piece[: len(piece) - len(rest)]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0
        values += outside.count(b",")
        keys += outside.count(b":")
        brackets = outside.translate(None, _OTHERS)
        lists += brackets.count(b"[") + brackets.count(b"{")
        for name, found, most in (
            ("lists and objects", lists, room.lists),
            ("keys", keys, room.keys),
            ("values", values, room.values),
        ):
            if found > most:
                raise NoRoom(f"the request's body holds {found} {name} or more: expected at most "
                             f"{most} in one request")  # fmt: skip
        depth = _deepest(brackets, depth)
        if depth < 0:
            return  # not JSON: its reader reports that


def _deepest(brackets: bytes, depth: int) -> int:
    """Return the depth after some brackets; -1 if more are closed than were opened."""

    def step(depth: int, bracket: int) -> int:
        depth += _STEPS[bracket] if depth >= 0 else 0
        if depth > DEEPEST:
            raise NoRoom(
                f"the request's body is nested too deeply: expected at most {DEEPEST} lists and "
                "objects in each other"
            )
        return depth

    return reduce(step, brackets, depth)

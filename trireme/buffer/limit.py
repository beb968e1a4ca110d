"""Limit: cuts a copy for people to its limit in bytes, and notes how much was removed.

A copy past its limit is cut to nine tenths of it: by age, or group by group by a hash of the
group's id, so that a sample of all steps remains.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trireme.files import json_or, read_json, write_json

SHARE = 0.9
"""Share of the limit that a cut leaves."""


def fitting(rows: Sequence[tuple[Any, str, int]], limit: float, *, sampled: bool) -> Iterator[Any]:
    """Yield the keys of the rows (key, group, bytes; oldest first) that remain within `limit`
    bytes.
    """
    order: Iterable[Sequence[tuple[Any, str, int]]] = ((row,) for row in reversed(rows))
    if sampled:  # a group's rank is the same at every cut: removed groups stay away
        groups: dict[str, list[tuple[Any, str, int]]] = {}
        for row in reversed(rows):
            groups.setdefault(row[1], []).append(row)
        order = sorted(groups.values(), key=lambda group: zlib.crc32(group[0][1].encode()))
    left = limit
    for together in order:
        left -= sum(size for _, _, size in together)
        if left < 0:
            return
        yield from (key for key, _, _ in together)


def cut_file(copy_: Path) -> Path:
    """Return the file that notes how much of a copy is gone."""
    return copy_.with_name(f"{copy_.name}.cut.json")


def note_cut(copy_: Path, gone: int, *, sampled: bool) -> None:
    """Add to the number of removed rows or lines."""
    path = cut_file(copy_)
    before = json_or(path, dict[str, Any]()).get("gone")
    gone += before if isinstance(before, int) else 0
    write_json(path, {"gone": gone, "left": "sampled" if sampled else "newest"})


def what_is_cut(copy_: Path) -> str | None:
    """Describe what is missing from a copy past its limit, as a sentence; None if it was
    not cut.
    """
    try:
        cut = read_json(cut_file(copy_))
    except FileNotFoundError:
        return None
    left = "the newest" if cut.get("left") == "newest" else "a sample of whole groups"
    return (
        f"this copy was cut at its limit (data_processor.experience_pipeline.copy_limit_mb): "
        f"{cut.get('gone')} experiences are gone, {left} stayed"
    )

"""Docker ignore: the files of a task's `environment/` that its `.dockerignore` keeps from COPY.

Patterns are Docker's: `*`, `?`, `[a-z]`, `**` for any number of folders, `!` for exceptions; the
last one that matches a path, or a folder above it, decides.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

FILES = ("Dockerfile.dockerignore", ".dockerignore")
"""The names of such a file; the first one that exists is read."""


class Pattern(NamedTuple):
    """One line of the file."""

    path: re.Pattern[str]
    excepted: bool
    """Whether the line begins with `!`."""


def patterns_of(text: str) -> list[Pattern]:
    """Return the patterns in a file. Raises ValueError that names a wrong line."""
    patterns = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        stripped = line.strip()
        excepted = stripped.startswith("!")
        path = posixpath.normpath(stripped[excepted:].strip() or ".").lstrip("/")
        if line.startswith("#") or path in ("", "."):
            continue
        try:
            patterns.append(Pattern(re.compile("".join(_expression(path)), re.DOTALL), excepted))
        except (re.error, IndexError) as error:
            raise ValueError(f"line {number}, `{line:.60}`, is no pattern: {error}") from None
    return patterns


def left_out(paths: Iterable[PurePosixPath], patterns: list[Pattern]) -> frozenset[str]:
    """Return the paths that are not copied: files, and folders without a file that is. `paths` are
    all of a folder's, relative to it.
    """
    out = set[PurePosixPath]()
    copied = set[PurePosixPath]()
    for path in paths:
        if _ignored(path, patterns):
            out.add(path)
        else:
            copied.update(path.parents)
    return frozenset(map(str, out - copied))


def _ignored(path: PurePosixPath, patterns: list[Pattern]) -> bool:
    names = [str(path), *map(str, path.parents)][: len(path.parts)]
    ignored = False
    for pattern in patterns:
        if ignored == pattern.excepted and any(map(pattern.path.fullmatch, names)):
            ignored = not ignored
    return ignored


def _expression(pattern: str) -> Iterator[str]:
    """Yield the parts of a regular expression for a pattern."""
    at = 0
    while at < len(pattern):
        char, at = pattern[at], at + 1
        if pattern.startswith("**/", at - 1):
            at += 2
            yield "(?:.*/)?"
        elif pattern.startswith("**", at - 1):
            at += 1
            yield ".*"
        elif char == "*":
            yield "[^/]*"
        elif char == "?":
            yield "[^/]"
        elif char == "[":
            end = pattern.index("]", at + 1) if "]" in pattern[at + 1 :] else len(pattern)
            inner = pattern[at:end]
            at = end + 1
            yield f"[{inner}]" if end < len(pattern) else f"[{inner}"
        elif char == "\\":
            char, at = pattern[at], at + 1
            yield re.escape(char)
        else:
            yield re.escape(char)

"""Dialect: what the keys, options and classes of another system mean here.

Every dialect is asked, in the order of their names in DIALECTS; asking one imports nothing heavy.
The table `key` of a manifest lists keys that its dialect reads: where the extension is not here, a
file that has one of them is told which extension it needs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from trireme.extensions import missing
from trireme.registry import DIALECTS

if TYPE_CHECKING:
    from trireme.config.section import Fate

logger = logging.getLogger(__name__)

_STAGE = re.compile(r"^stages\[\d+\]\.")


class Dialect(Protocol):
    """One system's dialect, made without arguments; a method that it does not have does nothing."""

    def keys(self, values: dict[str, Any]) -> Sequence[str]:
        """Change the plain values of a file, before they are validated. Returns notes on it."""
        return ()

    def options(self, key: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any, Fate]]:
        """Options of the system among the values of a key that takes any: dotted path below it,
        value and fate of each.
        """
        return ()

    def adapt(self, kind: str, name: str, thing: Any) -> Any:
        """A class of the system's form as what ours is, or None: it is of another form. `kind` is a
        key of the section `algorithm`, `name` its value. Raises ValueError for what cannot be used.
        """
        return None

    def stand_in(self) -> None:
        """Make what users' files import of the system importable, before these are loaded.

        A loader of these packages may have a method `explain(error) -> str`: what to add to the
        sentence on an import that fails.
        """


def dialects() -> list[Dialect]:
    """All dialects. One that cannot be made is left out with a warning."""
    made = (_made(name) for name in DIALECTS.names())
    return [dialect for dialect in made if dialect is not None]


@cache
def _made(name: str) -> Dialect | None:
    try:
        return DIALECTS.get(name)()
    except Exception as error:
        logger.warning("dialect '%s' is left out: it cannot be used: %s", name, error)
        return None


def adapted(kind: str, name: str, thing: Any) -> Any:
    """A class of another system's form as what ours is; a thing that no dialect knows as it is."""
    for dialect in dialects():
        if (ours := dialect.adapt(kind, name, thing)) is not None:
            return ours
    return thing


def options_in(key: str, values: Any) -> list[tuple[str, Any, Fate]]:
    """Options of other systems among the values of a key: dotted path, value and fate of each."""
    if not isinstance(values, Mapping):
        return []
    return [option for dialect in dialects() for option in dialect.options(key, values)]


def unread(key: str) -> str:
    """The rest of a sentence on a key that only an extension reads which is not here; else ''."""
    return missing("key", _STAGE.sub("", key))

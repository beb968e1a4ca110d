"""Dialect: translates the keys, options and classes of another system.

Every dialect is asked, in the order of their names in DIALECTS; asking one imports nothing heavy.
The table `key` of a manifest lists keys that its dialect reads, and `field` those that it adds to
the schema: if the extension is missing, a file with one of them gets an error that names the
extension.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from trireme.extensions import missing
from trireme.registry import DIALECTS

if TYPE_CHECKING:
    from trireme.config.section import Fate

_STAGE = re.compile(r"^stages\[\d+\]\.")


class Dialect(Protocol):
    """The dialect of one system, made without arguments; a method that it lacks does nothing."""

    prefix: str = ""
    """Prefix of the system's environment variables, each of which may stand for ours of that name.
    """

    def keys(self, values: dict[str, Any]) -> Sequence[str]:
        """Translate the plain values of a file in place, before they are validated. Returns
        notes.
        """
        return ()

    def replacement(self, name: str) -> str:
        """Return our key for a name that the system uses, or words that say what replaces it; ''
        for an unknown name. It is suggested where a file has the name as a key: asked for are the
        dotted key, that of each key below it, and its last part alone.
        """
        return ""

    def options(self, key: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any, Fate]]:
        """Find options of the system among the values of a free-form key: dotted path below it,
        value and fate of each.
        """
        return ()

    def adapt(self, kind: str, name: str, thing: Any) -> Any:
        """Convert a class of the system's form to ours; None: it has another form. `kind` is a key
        of the section `algorithm`, `name` its value; or it is `reward`, and `thing` a
        function. Raises ValueError if it cannot be used.
        """
        return None

    def stand_in(self) -> None:
        """Make the system's modules that users' files import importable, before these files are
        loaded.

        A loader of these packages may have a method `explain(error) -> str`, which adds to the
        sentence on a failed import.
        """


def dialects() -> list[Dialect]:
    """Return all dialects. One that cannot be made is left out with a warning."""
    return [*DIALECTS.make_all().values()]


def adapted(kind: str, name: str, thing: Any) -> Any:
    """Convert a class of another system's form to ours; a thing that no dialect knows is returned
    as is.
    """
    for dialect in dialects():
        if (ours := dialect.adapt(kind, name, thing)) is not None:
            return ours
    return thing


def options_in(key: str, values: Any) -> list[tuple[str, Any, Fate]]:
    """Find options of other systems among the values of a key: dotted path, value and fate
    of each.
    """
    if not isinstance(values, Mapping):
        return []
    return [option for dialect in dialects() for option in dialect.options(key, values)]


def replaced(key: str) -> str:
    """Return what replaces a dotted key of another system, as a hint; '' for an unknown one."""
    name = _STAGE.sub("", key)
    found = next((ours for dialect in dialects() if (ours := dialect.replacement(name))), "")
    if not found:
        return ""
    if found.startswith("no key: "):
        return found.replace("no key", "no key replaces it", 1)
    return f"did you mean '{found}'?" if re.fullmatch(r"[\w.]+", found) else f"use {found}"


def deleting(override: str) -> str:
    """Return what to do in place of Hydra's `~a.b`, which deletes a key; '' for other words."""
    match = re.fullmatch(r"~([\w.\[\]]+)(=.*)?", override)
    if match is None:
        return ""
    return (
        f"override {override!r}: Hydra's ~ deletes no key here: expected the YAML without it, or "
        f"{match[1]}=VALUE"
    )


def replacements(key: str, value: Any) -> list[tuple[str, str]]:
    """Return the keys of another system in the value of an unknown key, each with its hint. The
    hint of a section stands for keys that have none, or the same; it is '' if no dialect knows it.
    """
    hint = replaced(key)
    if not isinstance(value, Mapping) or not value:
        return [(key, hint)]
    below = [one for name, inner in value.items() for one in replacements(f"{key}.{name}", inner)]
    known = [(name, its) for name, its in below if its not in ("", hint)]
    return known if len(known) == len(below) else [*known, (key, hint)]


def unread(key: str) -> str:
    """Return the rest of a sentence on a key that only a missing extension reads; else ''."""
    name = _STAGE.sub("", key)
    return missing("key", name) or missing("field", name)

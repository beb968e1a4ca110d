"""Variables: reads the environment variables that files and users name, ours (TRIREME_*) and those
of other systems.

A variable of a pair that is not set has the value of the other, so that either name works in a YAML
and in a shell.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from trireme.config.dialect import dialects

_PREFIX = "TRIREME_"


def variable(name: str, default: str = "") -> str:
    """Return the variable `TRIREME_<name>`, or the one of a dialect's prefix; `default`: neither is
    set.
    """
    prefixes = (_PREFIX, *_prefixes())
    values = (os.environ.get(prefix + name) for prefix in prefixes)
    return next(filter(None, values), default)


@contextmanager
def either_name() -> Iterator[None]:
    """Set the missing one of each pair of variables while a file is read."""
    missing: dict[str, str] = {}
    for name, value in os.environ.items():
        for theirs in _prefixes():
            for prefix, other in ((_PREFIX, theirs), (theirs, _PREFIX)):
                if name.startswith(prefix) and other + name.removeprefix(prefix) not in os.environ:
                    missing[other + name.removeprefix(prefix)] = value
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _prefixes() -> list[str]:
    return [dialect.prefix for dialect in dialects() if dialect.prefix]

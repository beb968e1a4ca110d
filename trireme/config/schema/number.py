"""Number: a dataclass field that knows its range, so that the loader can say what is allowed."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def number(
    default: float | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A numeric field with `default`; None is outside the range and means "not given"."""
    limits = {"at_least": at_least, "above": above, "at_most": at_most}
    given = {name: bound for name, bound in limits.items() if bound is not None}
    return field(default=default, metadata=given)

"""Import path of experiences."""

from __future__ import annotations

from trireme.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "EID": "trireme.experience",
        "Experience": "trireme.experience",
        "group_by": "trireme.experience",
    },
)

"""Import path of the log."""

from __future__ import annotations

from trireme.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "get_logger": "trireme.log",
    },
)

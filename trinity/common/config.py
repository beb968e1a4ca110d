"""Import path of the configuration."""

from __future__ import annotations

from trireme.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "Config": "trireme.config",
        "load_config": "trireme.config",
    },
)

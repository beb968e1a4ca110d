"""Import path of the model that class workflows hold."""

from __future__ import annotations

from trireme.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "ModelWrapper": "trireme.model.blocking:BlockingModel",
    },
)

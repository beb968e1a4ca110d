"""Import path of the WebShop workflow."""

from __future__ import annotations

from trireme.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "WebShopWorkflow": "trireme.workflows.webshop",
        "format_observation": "trireme.workflows.webshop",
        "parse_action": "trireme.workflows.webshop",
    },
)

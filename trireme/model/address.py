"""Address: where programs of this machine reach a rollout's Model, and the gateway that opens it.

An extension brings the gateway, by the name GATEWAY of GATEWAYS; it is made for the first rollout
that asks for an address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from trireme.registry import GATEWAYS

if TYPE_CHECKING:
    from trireme.engines.engine import Engine
    from trireme.model.chat_tokens import ChatTokens
    from trireme.model.model import Model

GATEWAY = "http"
"""The name in GATEWAYS of the gateway that rollouts use."""


@dataclass(frozen=True)
class Address:
    """The address where programs of this machine reach a rollout's Model, with its own key."""

    base_url: str
    """The URL for OpenAI's clients, with `/v1` at its end."""
    api_key: str
    close: Callable[[], None] = field(repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables from which OpenAI's and Anthropic's clients read it.
        Anthropic's append `/v1` themselves.
        """
        root = self.base_url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
        }


class Gateway(Protocol):
    """An HTTP front that gives rollouts addresses, where programs reach their Models. Made from an
    engine, the rules that turn conversations into tokens, the model's path and the most tokens.
    """

    def address(self, model: Model) -> Address:
        """Return a new address for `model`. Raises OSError if none can be opened."""
        ...

    async def close(self) -> None:
        """Close all addresses."""
        ...


class Addresses:
    """The addresses of an explorer's rollouts, from a gateway that is made on first use."""

    def __init__(
        self, engine: Engine, chat: ChatTokens, model_path: str, max_model_len: int
    ) -> None:
        self._parts = engine, chat, model_path, max_model_len
        self._gateway: Gateway | None = None

    def address(self, model: Model) -> Address:
        """Return a new address for `model`, see Gateway. Raises ValueError if there is no
        gateway.
        """
        gateway = self._gateway
        if gateway is None:
            gateway = self._gateway = cast(Gateway, GATEWAYS.get(GATEWAY)(*self._parts))
        return gateway.address(model)

    async def close(self) -> None:
        """Close all addresses."""
        if self._gateway is not None:
            await self._gateway.close()

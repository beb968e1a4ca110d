"""Address: where programs of this machine find a rollout's Model. A gateway makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


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

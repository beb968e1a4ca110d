"""Auxiliary models: further models that workflows and judges may ask.

One that an engine of this run serves is an ordinary Model, made anew for each rollout. One behind
an OpenAI-compatible endpoint is an Endpoint: it answers by the OpenAI clients alone.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


class Endpoint:
    """A model of someone else's server. One object serves all rollouts."""

    def __init__(
        self, base_url: str, model_path: str, *, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        """`model_path` is the name that requests give; `timeout` is of one request, in seconds."""
        self.model_path = model_path
        self.base_url = base_url
        self._options: dict[str, Any] = {
            "base_url": base_url,
            "api_key": api_key or "EMPTY",
            "timeout": timeout,
        }
        self._clients: dict[int, AsyncOpenAI] = {}
        self._client: OpenAI | None = None

    def blocking(self, loop: asyncio.AbstractEventLoop | None = None) -> Endpoint:
        """What class workflows hold: itself."""
        return self

    def get_openai_async_client(self) -> AsyncOpenAI:
        """The asynchronous client of this event loop; `client.model_path` is set."""
        import openai

        try:
            loop = id(asyncio.get_running_loop())
        except RuntimeError:
            loop = 0  # made in a thread of a class workflow, whose loop comes later
        if loop not in self._clients or not loop:
            client = openai.AsyncOpenAI(**self._options)
            client.model_path = self.model_path  # type: ignore[attr-defined]
            self._clients[loop] = client
        return self._clients[loop]

    def get_openai_client(self) -> OpenAI:
        """The blocking client; `client.model_path` is set."""
        import openai

        if self._client is None:
            self._client = openai.OpenAI(**self._options)
            self._client.model_path = self.model_path  # type: ignore[attr-defined]
        return self._client

    async def logprobs(self, tokens: Any, temperature: float = 1.0) -> NoReturn:
        """Raises ValueError: the OpenAI API scores no given ids."""
        raise ValueError(
            f"the auxiliary model {self.model_path} at {self.base_url} cannot score given tokens: "
            "a teacher needs its own engine (engine_type torch), or engine_type remote"
        )

"""Endpoint: an auxiliary model on an external server (`engine_type: external`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn

from trireme.aio import running_loop
from trireme.ext.external_model.asker import refuse_silent

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from trireme.explorer.runner import Key


class Endpoint:
    """A model on an external server, reached only through the OpenAI clients."""

    def __init__(
        self, base_url: str, model_path: str, *, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        """`model_path` is the model name in requests; `timeout` is per request, in seconds."""
        self.model_path = model_path
        self.base_url = base_url
        self._options: dict[str, Any] = {
            "base_url": base_url,
            "api_key": api_key or "EMPTY",
            "timeout": timeout,
        }
        self._clients: dict[int, AsyncOpenAI] = {}
        self._client: OpenAI | None = None

    @staticmethod
    def reach(who: str, url: str) -> None:
        """Raise ValueError, naming `who`, if nothing answers at the address."""
        refuse_silent(who, url)

    def model(self, key: Key) -> Endpoint:
        """Return the object that workflows use: this one, which is stateless and serves all
        rollouts.
        """
        return self

    def blocking(self, loop: asyncio.AbstractEventLoop | None = None) -> Endpoint:
        """Return the object that class workflows use: this one."""
        return self

    def get_openai_async_client(self) -> AsyncOpenAI:
        """Return the asynchronous client of this event loop; `client.model_path` is set."""
        import openai

        running = running_loop()
        loop = id(running) if running else 0  # 0: a class workflow's thread, its loop starts later
        if loop not in self._clients or not loop:
            client = openai.AsyncOpenAI(**self._options)
            client.model_path = self.model_path  # type: ignore[attr-defined]
            self._clients[loop] = client
        return self._clients[loop]

    def get_openai_client(self) -> OpenAI:
        """Return the blocking client; `client.model_path` is set."""
        import openai

        if self._client is None:
            self._client = openai.OpenAI(**self._options)
            self._client.model_path = self.model_path  # type: ignore[attr-defined]
        return self._client

    async def logprobs(self, tokens: Any, temperature: float = 1.0) -> NoReturn:
        """Raise ValueError: the OpenAI API cannot score given ids."""
        raise ValueError(
            f"the auxiliary model {self.model_path} at {self.base_url} cannot score given tokens: "
            "a teacher needs its own engine (engine_type torch), or engine_type remote"
        )

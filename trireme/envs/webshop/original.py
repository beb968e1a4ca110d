"""Original: sessions of the package web_agent_site, where a user has installed it.

Its products are loaded once in a process, for all sessions. Its goals draw their price limits from
Python's global random source before the package seeds it: it is seeded here first, so that every
process has the same texts, and left as it was.
"""

from __future__ import annotations

import random
from importlib import import_module
from threading import Lock
from typing import Any
from uuid import uuid4

_loading = Lock()
_servers: dict[tuple[Any, ...], Any] = {}


class OriginalEnv:
    """A session of the original's `WebAgentTextEnv`, with `reset` and `step` as ours."""

    def __init__(
        self,
        *,
        observation_mode: str = "text_rich",
        human_goals: bool = True,
        num_products: int | None = None,
        limit_goals: int = -1,
        show_attrs: bool = False,
        seed: int = 0,
    ) -> None:
        """Raises ModuleNotFoundError saying what to do where the package is not installed."""
        try:
            make = import_module("web_agent_site.envs").WebAgentTextEnv
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "workflow_args.original is true, and the package web_agent_site is not installed: "
                f"leave it out to use the built-in shop [{error}]"
            ) from error
        loaded = {
            "human_goals": human_goals,
            "num_products": num_products,
            "limit_goals": limit_goals,
            "show_attrs": show_attrs,
        }
        key = (*loaded.values(), seed)
        with _loading:
            if key not in _servers:
                before = random.getstate()
                random.seed(seed)
                try:
                    _servers[key] = make(observation_mode=observation_mode, **loaded).server
                finally:
                    random.setstate(before)
        # sessions of one server are told apart by their names: those of a group have one number
        self._prefix, self._server = f"{uuid4().hex}-", _servers[key]
        self._env = make(
            observation_mode=observation_mode, server=self._server, session_prefix=self._prefix
        )

    def reset(self, session: int | str | None = None) -> tuple[str, None]:
        """The shop's first page."""
        return self._env.reset(session=session)

    def step(self, action: str) -> tuple[str, float, bool, None]:
        """What the page shows now."""
        return self._env.step(action)

    def get_available_actions(self) -> dict[str, Any]:
        """Whether there is a search bar, and what can be clicked."""
        return self._env.get_available_actions()

    def close(self) -> None:
        """The server forgets the session."""
        for name in list(self._server.user_sessions):  # a copy: other threads go on
            if name.startswith(self._prefix):
                del self._server.user_sessions[name]
        self._env.close()

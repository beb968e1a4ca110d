"""Events: what the parts of a run report, kept in order until the command asks for it.

A part of its own where explorer and trainer are not of one command; else the coordinator is one.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from trireme.launch.ray.made import Made


class Events:
    """The other end of Relay."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, ...]] = []
        self._event = asyncio.Event()

    async def open(self, made: Made) -> None:
        """Nothing is needed of the run."""

    async def report(self, event: tuple[Any, ...]) -> None:
        """Something for the console and the monitors."""
        self._events.append(event)
        self._event.set()

    async def events(self, wait: float) -> list[tuple[Any, ...]]:
        """What was reported since the last call; waits for something, `wait` seconds at most."""
        self._event.clear()
        if not self._events:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._event.wait(), wait)
        found, self._events = self._events, []
        return found

    async def stop(self) -> None:
        """Nothing is held."""

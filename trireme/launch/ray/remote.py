"""Remote: calls parts in other processes by their own methods, and passes on what they report.

- `Actor` is the one actor class. A part is a plain async class, made empty, so that all processes
  start side by side, and gets its plan by a call. Ray gives each concurrency group an event loop of
  its own; a part is not made for several. So its work runs on one loop in a thread of ours, and
  Ray's loops only hand calls over and wait. The heartbeat (`ping`) waits for no call.
- `remote` is a part in another process with the type of the part: a method's name becomes a text
  here alone, where it enters the wire.
- `Reports` keeps what a part says until the command has it: a call whose answer is lost takes
  nothing with it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import RayTaskError

from trireme.experience import Experience
from trireme.serialize import encode

T = TypeVar("T")
Event = tuple[Any, ...]
"""A method of Console, and what it is called with."""


class Part:
    """What runs in an actor."""

    def method(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """The async method that a call from elsewhere names."""
        return getattr(self, name)

    def health(self) -> None:
        """Raise RuntimeError where something that belongs to the part has ended."""

    async def stop(self) -> None:
        """Let go of what is held."""


class Actor:
    """One part in a process of its own."""

    def __init__(self, part: type[Part], folder: str) -> None:
        """`folder`: where the command was given, to which the YAML's paths are relative."""
        with suppress(FileNotFoundError):  # another machine may lack it, and need it for nothing
            os.chdir(folder)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="part", daemon=True).start()
        self._part = part()

    @ray.method(concurrency_group="calls")
    async def call(self, name: str, *args: Any) -> Any:
        """What the part's method returns or raises."""
        work = self._part.method(name)(*args)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @ray.method(concurrency_group="beat")
    async def ping(self) -> dict[str, Any]:
        """Where this process is; raises what the part says is wrong with it."""
        self._part.health()
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}


_actor: Any = ray.remote
RayActor: Any = _actor(concurrency_groups={"calls": 64, "beat": 4})(Actor)


class _Remote:
    """What stands for a part in another process: its async methods."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_"):  # Python's own questions, such as how to copy this
            raise AttributeError(name)
        return lambda *args: answer(self._handle.call.remote(name, *args))


def remote(part: type[T], handle: Any) -> T:
    """The part in this actor; its async methods raise here what they raised there."""
    return cast(T, _Remote(handle))


async def answer(reference: Any) -> Any:
    """What a call came to."""
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, RayTaskError):
            raise cause from None  # a cause would be taken for the other side's own error
        raise


class Reports:
    """A console in another process than the run's. What is said is heard in order."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._heard = 0
        self._new = asyncio.Event()

    def note(self, text: str) -> None:
        """See Console."""
        self._add("note", text)

    def step(self, part: str, step: int, metrics: Mapping[str, float]) -> None:
        """See Console."""
        self._add("step", part, step, {key: float(value) for key, value in metrics.items()})

    def rollout(self, experience: Experience) -> None:
        """See Console; the experience travels as bytes."""
        self._add("rollout", encode([experience]))

    async def events(self, heard: int, wait: float) -> list[Event]:
        """All but the first `heard` that were said; waits for one, `wait` seconds at most."""
        del self._events[: heard - self._heard]
        self._heard = heard
        if not self._events and wait:
            self._new.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._new.wait(), wait)
        return list(self._events)

    def _add(self, *event: Any) -> None:
        self._events.append(event)
        self._new.set()

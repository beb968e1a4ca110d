"""Env: the contract of an environment for a workflow, and readers of the usual forms of `step`.

It also imports optional modules that an environment needs, and writes an environment's tasks as
data sets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from inspect import isawaitable
from pathlib import Path
from typing import Any, Protocol

from trireme.aio import OwnThread, call_user, is_async
from trireme.files import write_jsonl, write_text
from trireme.log import get_logger
from trireme.rewards.reward import number
from trireme.usercode import Refused, UserCode


class Env(Protocol):
    """An environment with text to read and text to act by. Both may be coroutines; a method
    `blocking` then returns the same environment for a thread.
    """

    def reset(self) -> Any:
        """Return the first observation, or `(observation, info)`."""
        ...

    def step(self, action: str) -> Any:
        """Return `(observation, reward, done, info)`, or gymnasium's five with `truncated`."""
        ...


@dataclass(frozen=True)
class Seen:
    """The observation of an environment after a reset or a step."""

    observation: Any
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class OpenEnv:
    """An environment during an episode. Its plain methods run in a separate thread, which also
    closes it: a hanging call stays in that thread, and blocks no other episode.
    """

    def __init__(self, name: str, *, thread: bool = True) -> None:
        """`thread`: plain methods run in a separate thread; otherwise on the event loop."""
        self.env: Any = None
        self._thread = OwnThread(name) if thread else None

    async def make(self, make: Callable[..., Any], *args: Any) -> None:
        """Make the environment with `make(*args)`, which may be a coroutine."""

        def made() -> Any:  # stays in its own thread, which closes it
            self.env = make(*args)

        if is_async(make):
            self.env = await make(*args)
        else:
            await self.call(made)
            if isawaitable(self.env):
                self.env = await self.env

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the environment, or another of the user's that may take time."""
        return await call_user(function, *args, away=self._thread and self._thread.run)

    async def close(self) -> None:
        """Close it; in the thread, without waiting. Errors of it are logged."""
        close = getattr(self.env, "close", None)
        in_loop = self._thread is None or is_async(close)
        if self._thread is not None:
            self._thread.close(None if in_loop else self._close)
        if in_loop and close is not None:
            with errors_of_close_logged(self.env):
                await call_user(close)

    def _close(self) -> None:
        """Close the environment in its thread, where it may have been made only in the meantime."""
        with errors_of_close_logged(self.env):
            getattr(self.env, "close", lambda: None)()


@contextmanager
def errors_of_close_logged(owner: object) -> Iterator[None]:
    """Log an error of `owner.close` as a warning: the episode is complete, or has failed with an
    error that this one would hide.
    """
    try:
        yield
    except Exception:
        get_logger("explorer").warning("%s.close failed", type(owner).__name__, exc_info=True)


def for_thread(env: Any) -> Any:
    """Return the environment for code that does not await: the result of its `blocking` if `reset`
    is a coroutine and there is one, else itself.
    """
    blocking = getattr(env, "blocking", None) if is_async(getattr(env, "reset", None)) else None
    return env if blocking is None else blocking()


def after_reset(returned: Any, method: str = "the environment's reset", code: Any = None) -> Seen:
    """Read the return value of `reset`: an observation, or `(observation, info)`.

    Raises Refused for a tuple with an info in another place, which would be shown to the model as
    it is; `method` and its `code` are what the error names.
    """
    if not isinstance(returned, tuple):
        return Seen(returned)
    if len(returned) == 2 and isinstance(returned[1], Mapping | None):
        return Seen(returned[0], info=returned[1] or {})
    if any(isinstance(value, Mapping) for value in returned):
        with UserCode(method, code):
            raise Refused(
                f"{method} returned {returned!r:.80}: expected an observation, or (observation, "
                "info)"
            )
    return Seen(returned)


def after_step(returned: Any, method: str = "the environment's step", code: Any = None) -> Seen:
    """Read the return value of `step`: four values (gym, TextWorld) or five (gymnasium).

    Raises Refused for anything else, for a reward that is no finite number, and for an end that is
    not true or false; `method` and its `code` are what the error names.
    """
    from trireme.experience import python_number  # loads torch, which who reads rows does not need

    with UserCode(method, code) as _:
        if not isinstance(returned, tuple) or len(returned) not in (4, 5):
            raise Refused(
                f"{method} returned {returned!r:.80}: expected (observation, reward, "
                "done, info), or (observation, reward, terminated, truncated, info)"
            )
        observation, reward, *ended, info = returned
        if reward is None:  # not 0: where it was forgotten, every episode would fail
            raise Refused(
                f"{method} gave the reward None: expected a number, 0 where there is none"
            )
        reward = number(python_number(reward), f"{method} gave the reward")
        names = ("done",) if len(ended) == 1 else ("terminated", "truncated")
        ends = [python_number(end) for end in ended]
        for name, end in zip(names, ends, strict=True):
            if not isinstance(end, bool | int):
                raise Refused(f"{method} gave {end!r:.60} as {name}: expected True or False")
        if not isinstance(info, Mapping | None):
            raise Refused(f"{method} gave the info {info!r:.60}: expected a dict")
        return Seen(observation, reward, any(ends), info or {})


def as_text(observation: Any, whose: str, code: Any = None) -> str:
    """Return an observation as text. Raises Refused for None and bytes, which a model would read as
    `None` and `b'...'`; `whose` and the `code` that gave it are what the error names.
    """
    if observation is None or isinstance(observation, bytes):
        with UserCode(whose, code):
            raise Refused(f"{whose} gave the observation {observation!r:.60}: expected text")
    return str(observation)


def extra(module: str, environment: str, group: str = "envs") -> Any:
    """Import a module. Raises ModuleNotFoundError with the command that installs it: the `group` of
    extras that contains it.
    """
    try:
        return import_module(module)
    except ImportError as error:  # also of a module that it needs in another version
        raise _not_installed(environment, group, str(error)) from error


def refuse_missing(needs: Mapping[str, str]) -> None:
    """Raise the same error if one of the modules -> environments is missing; nothing is
    imported.
    """
    for module, environment in needs.items():
        if find_spec(module) is None:
            raise _not_installed(environment, "envs", f"No module named '{module}'")


def _not_installed(environment: str, group: str, why: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"{environment} is not installed: pip install 'trireme-rl[{group}]' [{why}]"
    )


def write_splits(out: Path, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write `<split>.jsonl` for each split, and `dataset_dict.json` with their sizes."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        write_jsonl(out / f"{name}.jsonl", rows)
    sizes = {name: {"name": name, "num_examples": len(rows)} for name, rows in splits.items()}
    write_text(out / "dataset_dict.json", json.dumps({"splits": sizes}))

"""Operator: one step of the experience pipeline, as users write it and as the pipeline runs it.

Two forms. A function `(experiences, *, options)`, plain or `async`; and a class whose options go
into the constructor and whose `process(experiences)`, plain or `async`, is called for each explore
step, between an optional `prepare()` and `close()`. Either returns `(experiences, metrics)`, or the
experiences alone. Nothing is remembered from step to step: a run that goes on from a checkpoint
makes its operators anew.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trireme.experience import Experience
from trireme.nearest import refuse_unknown_options
from trireme.registry import Registry

Operated = tuple[list[Experience], dict[str, float]]


class ExperienceOperator(ABC):
    """The class form."""

    @abstractmethod
    def process(self, exps: list[Experience]) -> Any:
        """All experiences of an explore step -> those that stay, and metrics."""


class OperatorFailed(RuntimeError):
    """A user's operator raised, or gave back what cannot be trained."""


@dataclass(frozen=True)
class Operator:
    """An operator with its options."""

    name: str
    function: Callable[..., Any]
    made: Any = None
    """The instance, where it is a class."""

    async def __call__(self, experiences: Sequence[Experience]) -> Operated:
        """What the operator makes of an explore step. Raises OperatorFailed."""
        found = await self._call(self.function, list(experiences))
        kept, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(kept, list) or not all(isinstance(e, Experience) for e in kept):
            raise OperatorFailed(
                f"operator '{self.name}' returned {type(kept).__name__}: expected a list of "
                f"experiences, or (experiences, metrics)"
            )
        self._check_ids(experiences, kept)
        return kept, {str(key): float(value) for key, value in (metrics or {}).items()}

    async def prepare(self) -> None:
        """Once, before the first step."""
        if (function := getattr(self.made, "prepare", None)) is not None:
            await self._call(function)

    async def close(self) -> None:
        """Once, at the end."""
        if (function := getattr(self.made, "close", None)) is not None:
            await self._call(function)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Foreign code: a blocking one in a thread, and its error with the operator's name."""
        try:
            if inspect.iscoroutinefunction(_plain(function)):
                return await function(*args)
            return await asyncio.to_thread(function, *args)
        except Exception as error:
            raise OperatorFailed(
                f"operator '{self.name}' failed: {type(error).__name__}: {error}"
            ) from error

    def _check_ids(self, before: Sequence[Experience], after: Sequence[Experience]) -> None:
        """Nothing is doubled, and nothing joins from another group."""
        ids = Counter(experience.eid.uid for experience in after)
        twice = [uid for uid, count in ids.items() if count > 1]
        if twice:
            raise OperatorFailed(
                f"operator '{self.name}' returned the experience {twice[0]} twice: a copy needs an "
                f"eid of its own (another suffix, say)"
            )
        strangers = {e.eid.tid for e in after} - {e.eid.tid for e in before}
        if strangers:
            raise OperatorFailed(
                f"operator '{self.name}' returned an experience of the group {min(strangers)}, "
                f"which this explore step has not"
            )


def make_operator(registry: Registry, name: str, args: Mapping[str, Any], key: str) -> Operator:
    """The operator that `name` stands for. ValueError, naming `key`, for what it cannot be."""
    found: Any = registry.get(name)
    if not callable(found):
        raise ValueError(f"{key} '{name}' is {type(found).__name__}: expected a function or class")
    _check_options(key, name, found, args)
    if not inspect.isclass(found):
        return Operator(name, partial(found, **args) if args else found)
    made: Any = found(**args)
    if not callable(getattr(made, "process", None)):
        raise ValueError(f"{key} '{name}': class {found.__name__} has no method 'process'")
    return Operator(name, made.process, made)


def _check_options(key: str, name: str, found: Any, args: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(found).parameters.values())
    if not inspect.isclass(found):
        parameters = parameters[1:]  # what it works on
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
        refuse_unknown_options(f"{key} '{name}'", args, known)
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in args]
    if missing:
        raise ValueError(f"{key} '{name}' needs the option '{missing[0]}'")


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: `partial` hides that it is a coroutine function."""
    return function.func if isinstance(function, partial) else function

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

from trireme.config.options import fitting_options
from trireme.experience import Experience
from trireme.registry import Registry
from trireme.usercode import UserCode, fault_of, refuse_signature

_BUILT_IN = "trireme.pipeline.operators"
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
            with UserCode(f"operator '{self.name}'", function):
                if inspect.iscoroutinefunction(_plain(function)):
                    return await function(*args)
                return await asyncio.to_thread(function, *args)
        except Exception as error:
            raise OperatorFailed(str(fault_of(error))) from error

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
    whose = f"{key} '{name}'"
    options = fitting_options(whose, found, args, first=0 if inspect.isclass(found) else 1)
    if not inspect.isclass(found):
        refuse_signature(whose, found, found, "(experiences)", **options)
        function = partial(found, **options) if options else found
        if found.__module__ == _BUILT_IN:  # looks at its options first, and here at nothing else
            try:
                function([])
            except ValueError as error:
                raise ValueError(f"{whose}: {error}") from error
        return Operator(name, function)
    with UserCode(whose, found):
        made: Any = found(**options)
    if not callable(getattr(made, "process", None)):
        raise ValueError(f"{whose}: class {found.__name__} has no method 'process'")
    refuse_signature(whose, made.process, made.process, "(experiences)")
    return Operator(name, made.process, made)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: `partial` hides that it is a coroutine function."""
    return function.func if isinstance(function, partial) else function

"""Rollouts: the engine behind a server, its conversations, and its limits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trireme.config.lookup import weight_files
from trireme.engines.engine import Engine, Sampling, with_options
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.pictures import IMAGE_PARTS

WEIGHTS_SLACK, WEIGHTS_UNKNOWN = 64 * 2**20, 2**36
"""Bytes of weights that a client may send beyond four times a model's files, or of another model
than a folder's."""
LEAST_TEXT = 2**20
"""Characters of a conversation that are taken of any model."""


def characters(value: Any) -> int:
    """Count the characters of all texts in a request's value, without those of pictures."""
    size, rest = 0, [value]
    while rest:
        match rest.pop():
            case str() as text:
                size += len(text)
            case list() as items if not isinstance(next(iter(items), None), int):  # no ids
                rest += items
            case dict() as items if items.get("type") not in IMAGE_PARTS:
                rest += items.values()
    return size


@dataclass
class Rollouts:
    """An engine with its tokenizer, and how conversations are led."""

    engine: Engine
    chat: ChatTokens
    model_path: str
    max_model_len: int
    scheduler: dict[str, Any] = field(default_factory=dict)
    """`scheduler` and `max_turns`, as in `workflow_args`."""
    use_async_engine: bool = True
    seed: int = 42
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=512))
    """The sampling of requests that set nothing else."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Further options of each Model."""
    _count: Any = field(default_factory=itertools.count)
    one_batch: asyncio.Lock = field(default_factory=asyncio.Lock)
    """For whom the engine is not asynchronous: one request at a time."""

    @cached_property
    def max_weight_bytes(self) -> int:
        """Return the limit on bytes of weights that were sent but not yet used; the stored model
        may have half as many bytes per weight.
        """
        stored = sum(file.stat().st_size for file in weight_files(Path(self.model_path)))
        return 4 * stored + WEIGHTS_SLACK if stored else WEIGHTS_UNKNOWN

    @cached_property
    def max_text(self) -> int:
        """Return the most characters of one conversation: more would be more tokens than the model
        accepts, even if all are the longest ones.
        """
        return max(LEAST_TEXT, self.max_model_len * self.chat.longest_token)

    def refuse_long(self, *texts: Any) -> None:
        """Raise ValueError for a conversation, messages or texts, that no model here can accept."""
        size = sum(map(characters, texts))
        if size > self.max_text:
            raise ValueError(
                f"a conversation has {size} characters, over the context length: expected at most "
                f"{self.max_text}, and {self.max_model_len} tokens"
            )

    @property
    def multi_turn(self) -> bool:
        """True if the server has a scheduler."""
        return self.scheduler.get("scheduler") is not None

    def model(self, key: tuple[Any, ...], options: Mapping[str, Any] | None = None) -> Model:
        """Make a Model with a separate record. Raises ValueError for unknown options."""
        return Model(
            self.engine,
            self.chat,
            key=key or ("request", next(self._count), 0),
            sampling=with_options(self.sampling, options or {}),
            max_model_len=self.max_model_len,
            model_path=self.model_path,
            **self.limits,
        )

    def session_model(self, name: str, times: int) -> Model:
        """Make the Model of a session; `times` others had its name."""
        return self.model(("session", name, times))


def as_key(wire: Any) -> Any:
    """Convert a request's key from JSON, where tuples are lists. Raises ValueError for objects in
    it.
    """
    if isinstance(wire, dict):
        raise ValueError(f"key holds {wire!r:.60}: expected numbers, texts, or lists of them")
    return tuple(map(as_key, wire)) if isinstance(wire, list) else wire

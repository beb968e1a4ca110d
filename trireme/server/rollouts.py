"""Rollouts: plays the requests of trainers turn by turn on the server's engine.

With the asynchronous engine every trajectory goes on as soon as its own reply is there. In batch
mode a turn begins when all trajectories of the request have ended the turn before.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trireme.aio import one_by_one
from trireme.config.lookup import weight_files
from trireme.engines.engine import Engine, Sampling, with_options
from trireme.experience import Experience
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.serialize import experience_to_wire
from trireme.usercode import UserCode
from trireme.workflows.scheduled import make_scheduler, samples
from trireme.workflows.scheduler import RolloutInferRequest
from trireme.workflows.turns import Ended, TurnBarrier, play

WEIGHTS_SLACK, WEIGHTS_UNKNOWN = 64 * 2**20, 2**36
"""Bytes of weights that a client may send beyond four times a model's files, or of another model
than a folder's."""
LEAST_TEXT = 2**20
"""Characters of a conversation that are taken of any model."""


def characters(value: Any) -> int:
    """Of all texts in a request's value."""
    size, rest = 0, [value]
    while rest:
        match rest.pop():
            case str() as text:
                size += len(text)
            case list() as items if not isinstance(next(iter(items), None), int):  # no ids
                rest += items
            case dict() as items:
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
    """For requests that say nothing else."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Further options of each Model."""
    _count: Any = field(default_factory=itertools.count)
    _one_batch: asyncio.Lock = field(default_factory=asyncio.Lock)

    @cached_property
    def max_weight_bytes(self) -> int:
        """Of weights that were sent and not put to use; the model may be stored in half of them."""
        stored = sum(file.stat().st_size for file in weight_files(Path(self.model_path)))
        return 4 * stored + WEIGHTS_SLACK if stored else WEIGHTS_UNKNOWN

    @cached_property
    def max_text(self) -> int:
        """Characters of one conversation: more than these are more tokens than the model takes, of
        the longest that there are.
        """
        return max(LEAST_TEXT, self.max_model_len * self.chat.longest_token)

    def refuse_long(self, *texts: Any) -> None:
        """Raise ValueError for a conversation, messages or texts, that no model here can take."""
        size = sum(map(characters, texts))
        if size > self.max_text:
            raise ValueError(
                f"a conversation has {size} characters, over the context length: expected at most "
                f"{self.max_text}, and {self.max_model_len} tokens"
            )

    @property
    def multi_turn(self) -> bool:
        """Whether the server has a scheduler."""
        return self.scheduler.get("scheduler") is not None

    def model(self, key: tuple[Any, ...], options: Mapping[str, Any] | None = None) -> Model:
        """A Model with a record of its own. Raises ValueError for unknown options."""
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
        """The Model of a session; `times` others had its name."""
        return self.model(("session", name, times))

    async def infer(
        self,
        requests: Sequence[RolloutInferRequest],
        options: Mapping[str, Any],
        *,
        key: tuple[Any, ...] = (),
        loss_scale: Any = "default",
    ) -> list[dict[str, Any]]:
        """The outputs of all requests, in order; a trajectory that was split gives several."""
        many = bool(key) and len(requests) > 1

        async def all_of(barrier: TurnBarrier | None) -> list[list[dict[str, Any]]]:
            return await one_by_one(
                self._one(r, options, (*key, index) if many else key, loss_scale, barrier)
                for index, r in enumerate(requests)
            )

        if self.use_async_engine:
            trajectories = await all_of(None)
        else:
            async with self._one_batch:  # the next batch waits for the slowest of this one
                trajectories = await all_of(TurnBarrier(len(requests)))
        return [output for outputs in trajectories for output in outputs]

    async def _one(
        self,
        request: RolloutInferRequest,
        options: Mapping[str, Any],
        key: tuple[Any, ...],
        loss_scale: Any,
        barrier: TurnBarrier | None,
    ) -> list[dict[str, Any]]:
        model, scheduler = self.model(key, options), make_scheduler(self.scheduler)
        try:
            name = self.scheduler.get("scheduler")
            with UserCode(f"multi_turn_scheduler '{name}'", scheduler) as _:
                ended = await play(
                    scheduler,
                    request,
                    model,
                    max_turns=self.scheduler.get("max_turns"),
                    barrier=barrier,
                )
        finally:
            model.revoke()
        name = request.uuid or "/".join(map(str, model.key))
        experiences = samples(model, ended, loss_scale, name)
        by_messages = {id(e.messages): e for e in ended}
        return [
            _output(by_messages.get(id(x.messages), ended[-1]), x, self.model_path)
            for x in experiences
        ]


def _output(ended: Ended, experience: Experience, model_path: str) -> dict[str, Any]:
    """One sample on the wire: ms-swift's RolloutOutput, and the experience itself."""
    turns = _turns(ended)
    choice = asdict(ended.choice)
    return {
        "response": {"model": model_path, "choices": [choice], "usage": _usage(experience)},
        "messages": experience.messages,
        "response_token_ids": [ids for ids, _, _ in turns],
        "response_loss_mask": [mask for _, mask, _ in turns],
        "rollout_logprobs": [logprobs for _, _, logprobs in turns],
        "rollout_infos": ended.infos,
        "experience": experience_to_wire(experience),
    }


def _turns(ended: Ended) -> list[tuple[list[int], list[int], list[float]]]:
    out = []
    for _, calls in itertools.groupby(ended.call.path, key=lambda c: len(c.messages or ())):
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        for index, call in enumerate(calls):
            between = call.inserted if index else []
            weights = call.weights or [1.0] * len(call.completion.ids)
            ids += [*between, *call.completion.ids]
            mask += [0] * len(between) + [int(weight != 0) for weight in weights]
            pairs = zip(call.completion.logprobs, weights, strict=True)
            logprobs += [p for p, weight in pairs if weight]
        out.append((ids, mask, logprobs))
    return out


def _usage(experience: Experience) -> dict[str, int]:
    sampled = int((experience.versions >= 0).sum()) if experience.versions is not None else 0
    total = len(experience.tokens)
    return {
        "prompt_tokens": total - sampled,
        "completion_tokens": sampled,
        "total_tokens": total,
    }


def as_key(wire: Any) -> Any:
    """A request's key from JSON, whose tuples are lists. Raises ValueError for objects in it."""
    if isinstance(wire, dict):
        raise ValueError(f"key holds {wire!r:.60}: expected numbers, texts, or lists of them")
    return tuple(map(as_key, wire)) if isinstance(wire, list) else wire

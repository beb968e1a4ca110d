"""Trajectories: plays the requests of trainers turn by turn on the server's engine.

With the asynchronous engine every trajectory continues as soon as its own reply has arrived. In
batch mode a turn begins when all trajectories of the request have ended the turn before.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trireme.aio import one_by_one
from trireme.experience import Experience
from trireme.ext.http.rollouts import Rollouts
from trireme.ext.multi_turn.scheduled import make_scheduler, samples
from trireme.ext.multi_turn.scheduler import RolloutInferRequest
from trireme.ext.multi_turn.turns import Ended, TurnBarrier, play
from trireme.serialize import experience_to_wire
from trireme.usercode import UserCode


async def infer(
    rollouts: Rollouts,
    requests: Sequence[RolloutInferRequest],
    options: Mapping[str, Any],
    *,
    key: tuple[Any, ...] = (),
    loss_scale: Any = "default",
) -> list[dict[str, Any]]:
    """Return the outputs of all requests, in order; a trajectory that was split has several."""
    many = bool(key) and len(requests) > 1

    async def all_of(barrier: TurnBarrier | None) -> list[list[dict[str, Any]]]:
        return await one_by_one(
            _one(rollouts, r, options, (*key, index) if many else key, loss_scale, barrier)
            for index, r in enumerate(requests)
        )

    if rollouts.use_async_engine:
        trajectories = await all_of(None)
    else:
        async with rollouts.one_batch:  # the next batch waits for the slowest of this one
            trajectories = await all_of(TurnBarrier(len(requests)))
    return [output for outputs in trajectories for output in outputs]


async def _one(
    rollouts: Rollouts,
    request: RolloutInferRequest,
    options: Mapping[str, Any],
    key: tuple[Any, ...],
    loss_scale: Any,
    barrier: TurnBarrier | None,
) -> list[dict[str, Any]]:
    model, scheduler = rollouts.model(key, options), make_scheduler(rollouts.scheduler)
    try:
        name = rollouts.scheduler.get("scheduler")
        with UserCode(f"multi_turn_scheduler '{name}'", scheduler) as _:
            ended = await play(
                scheduler,
                request,
                model,
                max_turns=rollouts.scheduler.get("max_turns"),
                barrier=barrier,
            )
    finally:
        model.revoke()
    name = request.uuid or model.rollout_name
    experiences = samples(model, ended, loss_scale, name)
    by_messages = {id(e.messages): e for e in ended}
    return [
        _output(by_messages.get(id(x.messages), ended[-1]), x, rollouts.model_path)
        for x in experiences
    ]


def _output(ended: Ended, experience: Experience, model_path: str) -> dict[str, Any]:
    """Return one sample in wire form: ms-swift's RolloutOutput, and the experience itself."""
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

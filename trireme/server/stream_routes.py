"""Stream routes: many generations in one request, each answered by a line when it has ended.

A connection for each rollout costs more than the tokens of a small model; so the remote engine
sends what it is asked for at one time together.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from trireme.engines.engine import MOST_SAMPLES, Completion, Sampling
from trireme.model.sampling import with_options
from trireme.server.app import JsonRoute
from trireme.server.engine_routes import GenerateBody
from trireme.server.rollouts import Rollouts, as_key

Tasks = list[asyncio.Task[list[Completion]]]


class StreamBody(BaseModel):
    """Generations with a name for all of them."""

    id: str
    requests: list[GenerateBody] = Field(max_length=MOST_SAMPLES)


class CancelBody(BaseModel):
    """One generation of a stream."""

    id: str
    index: int = Field(ge=0)


def make_router(rollouts: Rollouts) -> APIRouter:
    """See the module."""
    router = APIRouter(prefix="/engine", route_class=JsonRoute)
    streams: dict[str, Tasks] = {}

    async def generate(request: GenerateBody) -> list[Completion]:
        sampling = with_options(Sampling(), request.sampling)
        return await rollouts.engine.generate(request.ids, sampling, key=as_key(request.key))

    @router.post("/stream")
    async def stream(body: StreamBody) -> StreamingResponse:
        """Lines of JSON: `index` with `completions`, or with `error` and its `status`."""
        counts = [request.sampling.get("n") for request in body.requests]
        samples = sum(n if isinstance(n, int) else 1 for n in counts)
        if samples > MOST_SAMPLES:
            raise ValueError(
                f"the request's generations are {samples} samples: expected at most {MOST_SAMPLES}"
            )
        tasks = [asyncio.ensure_future(generate(request)) for request in body.requests]
        streams[body.id] = tasks

        async def lines() -> AsyncIterator[str]:
            try:
                async for line in _in_order_of_end(tasks):
                    yield line
            finally:  # also when the client has gone: its generations are aborted
                streams.pop(body.id, None)
                for task in tasks:
                    task.cancel()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @router.post("/cancel")
    async def cancel(body: CancelBody) -> dict[str, bool]:
        tasks = streams.get(body.id, [])
        return {"cancelled": body.index < len(tasks) and tasks[body.index].cancel()}

    return router


async def _in_order_of_end(tasks: Tasks) -> AsyncIterator[str]:
    """A line for each task when it has ended; those that end together come together."""
    ended: asyncio.Queue[int] = asyncio.Queue()
    for index, task in enumerate(tasks):
        task.add_done_callback(lambda _, index=index: ended.put_nowait(index))
    left = len(tasks)
    while left:
        ready = [await ended.get()]
        while not ended.empty():
            ready.append(ended.get_nowait())
        left -= len(ready)
        yield "".join(json.dumps(_line(index, tasks[index])) + "\n" for index in ready)


def _line(index: int, task: asyncio.Task[list[Completion]]) -> dict[str, Any]:
    if task.cancelled():
        return {"index": index, "aborted": True}
    error = task.exception()
    if error is None:
        return {"index": index, "completions": [vars(c) for c in task.result()]}
    status = 400 if isinstance(error, ValueError) else 500
    return {"index": index, "error": str(error), "status": status}

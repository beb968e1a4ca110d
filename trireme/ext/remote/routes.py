"""Engine routes: serves a remote engine's requests to the engine behind a server, and receives
weights.

- Many generations go in one request (`/engine/stream`), each answered by a line when it has ended:
  a connection for each rollout costs more than the tokens of a small model.
- A trainer leads an engine's workers through an update over a group (`/engine/group`): join, then
  receive and commit for each update. Between the two the engine is paused: it resumes only when all
  engines have everything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, cast
from weakref import WeakKeyDictionary

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from trireme.engines.engine import MOST_SAMPLES, Completion, Engine, Sampling, with_options
from trireme.engines.weights import refuse_unusable
from trireme.ext.http.bodies import JsonRoute, until_gone
from trireme.ext.http.rollouts import Rollouts, as_key
from trireme.ext.openai.wire import Ids
from trireme.ext.remote.group_engine import EmbeddedGroup, GroupEngine, refuse_no_weights
from trireme.ext.remote.shelf import PictureBody, Shelf
from trireme.ext.remote.weight_group import Meeting
from trireme.serialize import array_to_wire


class GenerateBody(BaseModel):
    """One prompt of token ids."""

    ids: Ids
    sampling: dict[str, Any] = Field(default_factory=dict)
    key: list[Any] = Field(default_factory=list)
    tokens: bool = False
    """In `/engine/stream`: a line for each token, too, when it is there."""
    pictures: Annotated[list[str], Field(fail_fast=True, max_length=1024)] = []
    """Digests of the pictures of `ids`, which `/engine/pictures` has received."""


class LogprobsBody(BaseModel):
    """Rows to be scored."""

    ids: Annotated[list[Ids], Field(fail_fast=True, max_length=1024)]
    temperature: float = Field(default=1.0, allow_inf_nan=False)
    pictures: Annotated[list[str], Field(fail_fast=True, max_length=1024)] = []


class KeyBody(BaseModel):
    """The key of the requests that a call is about."""

    key: list[Any] = Field(default_factory=list)


class PauseBody(BaseModel):
    """A pause, and whether new weights arrive before its end."""

    weights_follow: bool = False


class VersionBody(BaseModel):
    """The version number of new weights."""

    version: int = Field(ge=0, lt=2**53)
    begin: bool = False
    """Whether a new run takes the server over; its versions may be lower than the last one's."""


class CommitWeightsBody(VersionBody):
    """Weights that were sent before, or a folder of safetensors that the server can read."""

    path: str | None = None


def steering_router(rollouts: Rollouts) -> APIRouter:
    """Build the routes by which a trainer steers the engine."""
    shelf = _shelf_of(rollouts)
    router = APIRouter(prefix="/engine", route_class=JsonRoute)
    engine = rollouts.engine
    sent: dict[str, Tensor] = {}

    @router.get("/health")
    async def health() -> dict[str, Any]:
        return {
            **asdict(engine.health()),
            "seed": rollouts.seed,
            "max_model_len": rollouts.max_model_len,
            "multi_turn": rollouts.multi_turn,
        }

    @router.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> list[dict[str, Any]]:
        sampling = with_options(Sampling(), body.sampling)
        more = _shown(engine, shelf, body.pictures)
        work = engine.generate(body.ids, sampling, key=as_key(body.key), **more)
        return [_wire(completion) for completion in await until_gone(request, work)]

    @router.post("/logprobs")
    async def logprobs(body: LogprobsBody, request: Request) -> list[list[float]]:
        more = _shown(engine, shelf, body.pictures)
        work = engine.logprobs(body.ids, temperature=body.temperature, **more)
        return await until_gone(request, work)

    @router.post("/pictures")
    async def pictures(body: PictureBody) -> dict[str, str]:
        """Receive a picture, which later requests name by its digest."""
        shelf.put(body)
        return {"digest": body.digest}

    @router.post("/weights")
    async def weights(request: Request) -> dict[str, int]:
        """Receive a part of the weights as a safetensors body; `weights/commit` applies them."""
        try:
            part = await asyncio.to_thread(load, await request.body())
        except SafetensorError as error:
            raise ValueError(f"the body is not in the safetensors format: {error}") from error
        await asyncio.to_thread(refuse_unusable, part)
        size = sum(tensor.nbytes for tensor in (sent | part).values())
        if size > rollouts.max_weight_bytes:
            raise HTTPException(
                413,
                f"{size} bytes of weights were sent and are not applied yet: expected at most "
                f"{rollouts.max_weight_bytes}, for this model (POST /engine/weights/commit)",
            )
        sent.update(part)
        return {"tensors": len(part)}

    @router.post("/weights/commit")
    async def commit(body: CommitWeightsBody) -> dict[str, int]:
        refuse_older(engine, body.version, begin=body.begin)
        if body.path is not None:
            await asyncio.to_thread(refuse_no_weights, body.path)
        source: Any = body.path if body.path is not None else dict(sent)
        sent.clear()
        await engine.update_weights(source, body.version)
        return {"version": engine.health().version}

    @router.get("/fingerprint")
    async def fingerprint() -> dict[str, float] | None:
        return await engine.fingerprint()

    @router.post("/abort")
    async def abort(body: KeyBody) -> dict[str, int]:
        return {"aborted": await engine.abort(as_key(body.key))}

    @router.post("/pause")
    async def pause(body: PauseBody) -> dict[str, str]:
        await engine.pause(weights_follow=body.weights_follow)
        return {"message": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        await engine.resume()
        return {"message": "resumed"}

    return router


_SHELVES: WeakKeyDictionary[Engine, Shelf] = WeakKeyDictionary()


def _shelf_of(rollouts: Rollouts) -> Shelf:
    """Return the shelf of a server's engine, the same one for all routes."""
    return _SHELVES.setdefault(rollouts.engine, Shelf())


def _shown(engine: Engine, shelf: Shelf, digests: Sequence[str]) -> dict[str, Any]:
    """Return the engine's option for the pictures of a request. Raises ValueError for an engine
    that sees nothing, and a picture that is not here.
    """
    if not digests:
        return {}
    if not engine.traits.sees:
        raise ValueError("pictures: this server's engine samples from text alone")
    return {"pictures": shelf.get(digests)}


def refuse_older(engine: Engine, version: int, *, begin: bool) -> None:
    """Raise HTTPException for weights older than the engine's."""
    present = engine.health().version
    if version < present and not begin:
        raise HTTPException(
            409,
            f"version is {version}: expected {present}, which the engine serves, or a later one "
            "(begin: true, if a new run takes over the server)",
        )


Tasks = list[asyncio.Task[list[Completion]]]
Told = Callable[..., None]
Events = asyncio.Queue[tuple[int, Any]]
"""Which generation, and a token of it; None: it has ended."""


class StreamBody(BaseModel):
    """Generations with a name for all of them."""

    id: str
    requests: Annotated[list[GenerateBody], Field(fail_fast=True, max_length=MOST_SAMPLES)]


class CancelBody(BaseModel):
    """One generation of a stream."""

    id: str
    index: int = Field(ge=0)


def stream_router(rollouts: Rollouts) -> APIRouter:
    """Build the routes that stream the results of many generations over one connection."""
    router = APIRouter(prefix="/engine", route_class=JsonRoute)
    streams: dict[str, Tasks] = {}
    shelf = _shelf_of(rollouts)

    async def generate(request: GenerateBody, on_token: Told) -> list[Completion]:
        sampling = with_options(Sampling(), request.sampling)
        more = _shown(rollouts.engine, shelf, request.pictures)
        if request.tokens:
            more["on_token"] = on_token
        key = as_key(request.key)
        return await rollouts.engine.generate(request.ids, sampling, key=key, **more)

    @router.post("/stream")
    async def stream(body: StreamBody) -> StreamingResponse:
        """Return lines of JSON: `index` with `completions`, or with `error` and its `status`;
        before that with `token`, if a generation asks for its tokens.
        """
        counts = [request.sampling.get("n") for request in body.requests]
        samples = sum(n if isinstance(n, int) else 1 for n in counts)
        if samples > MOST_SAMPLES:
            raise ValueError(
                f"the request's generations are {samples} samples: expected at most {MOST_SAMPLES}"
            )
        events: Events = asyncio.Queue()
        tasks = [
            asyncio.ensure_future(generate(request, lambda *t, i=i: events.put_nowait((i, t))))
            for i, request in enumerate(body.requests)
        ]
        streams[body.id] = tasks

        async def lines() -> AsyncIterator[str]:
            try:
                async for line in _in_order_of_end(tasks, events):
                    yield line
            finally:  # also if the client has disconnected: its generations are aborted
                streams.pop(body.id, None)
                for task in tasks:
                    task.cancel()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @router.post("/cancel")
    async def cancel(body: CancelBody) -> dict[str, bool]:
        tasks = streams.get(body.id, [])
        return {"cancelled": body.index < len(tasks) and tasks[body.index].cancel()}

    return router


async def _in_order_of_end(tasks: Tasks, events: Events) -> AsyncIterator[str]:
    """Yield a line for each finished task, and for each streamed token; simultaneous ones are sent
    together.
    """
    for index, task in enumerate(tasks):
        task.add_done_callback(lambda _, index=index: events.put_nowait((index, None)))
    left = len(tasks)
    while left:
        ready = [await events.get()]
        while not events.empty():
            ready.append(events.get_nowait())
        left -= sum(token is None for _, token in ready)
        lines = (
            _line(index, tasks[index]) if token is None else {"index": index, "token": token}
            for index, token in ready
        )
        yield "".join(json.dumps(line) + "\n" for line in lines)


def _wire(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON."""
    if completion.routed_experts is None:
        return vars(completion)
    return vars(completion) | {"routed_experts": array_to_wire(completion.routed_experts)}


def _line(index: int, task: asyncio.Task[list[Completion]]) -> dict[str, Any]:
    if task.cancelled():
        return {"index": index, "aborted": True}
    error = task.exception()
    if error is None:
        return {"index": index, "completions": [_wire(c) for c in task.result()]}
    status = 400 if isinstance(error, ValueError) else 500
    return {"index": index, "error": str(error), "status": status}


MAX_TIMEOUT_S = 86400.0


BACKENDS = ("gloo", "nccl", "ipc")
"""Of weight groups."""


def group_router(rollouts: Rollouts) -> APIRouter:
    """Build the routes of a weight group: its size, joining it, and receiving weights."""
    router = APIRouter(prefix="/engine/group", route_class=JsonRoute)
    inner: Any = rollouts.engine
    engine = cast(GroupEngine, inner) if hasattr(inner, "group_size") else EmbeddedGroup(inner)

    @router.get("/size")
    async def size() -> dict[str, int]:
        return {"workers": engine.group_size}

    @router.post("/join")
    async def join(meeting: Meeting) -> dict[str, Any]:
        if not 1 <= meeting.rank < meeting.world_size:  # rank 0 is the trainer, and opens a port
            raise ValueError(f"rank is {meeting.rank}: expected 1 to world_size - 1")
        if not 0 < meeting.timeout <= MAX_TIMEOUT_S:
            raise ValueError(
                f"timeout is {meeting.timeout}: expected 0 to {MAX_TIMEOUT_S:g} seconds"
            )
        if not 1 <= meeting.port <= 65535 or meeting.backend not in BACKENDS:
            raise ValueError(
                f"port is {meeting.port}, backend {meeting.backend!r:.40}: expected 1 to 65535, "
                f"and one of {', '.join(BACKENDS)}"
            )
        await engine.join_group(meeting)
        return asdict(meeting)

    @router.post("/receive")
    async def receive() -> dict[str, str]:
        await engine.receive_weights()
        return {"message": "received"}

    @router.post("/commit")
    async def commit(body: VersionBody) -> dict[str, int]:
        refuse_older(inner, body.version, begin=body.begin)
        await engine.commit_weights(body.version)
        return {"version": body.version}

    return router

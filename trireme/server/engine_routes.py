"""Engine routes: the Engine protocol over HTTP, for `engine_type: remote`. Token ids in and out."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from trireme.engines.engine import Engine, Sampling
from trireme.engines.fingerprint import refuse_unusable
from trireme.model.sampling import with_options
from trireme.server.app import JsonRoute, until_gone
from trireme.server.rollouts import Rollouts, as_key


class GenerateBody(BaseModel):
    """One prompt of token ids."""

    ids: list[int]
    sampling: dict[str, Any] = Field(default_factory=dict)
    key: list[Any] = Field(default_factory=list)


class LogprobsBody(BaseModel):
    """Rows to be scored."""

    ids: list[list[int]] = Field(max_length=1024)
    temperature: float = Field(default=1.0, allow_inf_nan=False)


class KeyBody(BaseModel):
    """Whose requests."""

    key: list[Any] = Field(default_factory=list)


class CommitBody(BaseModel):
    """Weights that were sent before, or a folder of safetensors that the server can read."""

    version: int = Field(ge=0, lt=2**53)
    path: str | None = None
    begin: bool = False
    """Whether a new run takes the server over, whose versions may be lower than the last one's."""


def make_router(rollouts: Rollouts) -> APIRouter:
    """See the module."""
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
        work = engine.generate(body.ids, sampling, key=as_key(body.key))
        return [vars(completion) for completion in await until_gone(request, work)]

    @router.post("/logprobs")
    async def logprobs(body: LogprobsBody) -> list[list[float]]:
        return await engine.logprobs(body.ids, temperature=body.temperature)

    @router.post("/weights")
    async def weights(request: Request) -> dict[str, int]:
        """A part of the weights as a safetensors body; `weights/commit` puts them to use."""
        try:
            part = await asyncio.to_thread(load, await request.body())
        except SafetensorError as error:
            raise ValueError(f"the body holds no safetensors: {error}") from error
        await asyncio.to_thread(refuse_unusable, part)
        size = sum(tensor.nbytes for tensor in (sent | part).values())
        if size > rollouts.max_weight_bytes:
            raise HTTPException(
                413,
                f"{size} bytes of weights were sent and not put to use: expected at most "
                f"{rollouts.max_weight_bytes}, for this model (POST /engine/weights/commit)",
            )
        sent.update(part)
        return {"tensors": len(part)}

    @router.post("/weights/commit")
    async def commit(body: CommitBody) -> dict[str, int]:
        refuse_older(engine, body.version, begin=body.begin)
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
    async def pause() -> dict[str, str]:
        await engine.pause()
        return {"message": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        await engine.resume()
        return {"message": "resumed"}

    return router


def refuse_older(engine: Engine, version: int, *, begin: bool) -> None:
    """Raise HTTPException for weights that the engine has left behind."""
    present = engine.health().version
    if version < present and not begin:
        raise HTTPException(
            409,
            f"version is {version}: expected {present}, which the engine serves, or a later one "
            "(begin: true, where a new run takes the server over)",
        )

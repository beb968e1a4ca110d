"""Engine routes: the Engine protocol over HTTP, for `engine_type: remote`. Token ids in and out."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from safetensors.torch import load
from torch import Tensor

from trireme.engines.engine import Sampling
from trireme.model.sampling import with_options
from trireme.server.app import until_gone
from trireme.server.rollouts import Rollouts, as_key


class GenerateBody(BaseModel):
    """One prompt of token ids."""

    ids: list[int]
    sampling: dict[str, Any] = Field(default_factory=dict)
    key: list[Any] = Field(default_factory=list)


class LogprobsBody(BaseModel):
    """Rows to be scored."""

    ids: list[list[int]]
    temperature: float = 1.0


class KeyBody(BaseModel):
    """Whose requests."""

    key: list[Any] = Field(default_factory=list)


class CommitBody(BaseModel):
    """Weights that were sent before, or a folder of safetensors that the server can read."""

    version: int
    path: str | None = None


def make_router(rollouts: Rollouts) -> APIRouter:
    """See the module."""
    router = APIRouter(prefix="/engine")
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
        part = load(await request.body())
        sent.update(part)
        return {"tensors": len(part)}

    @router.post("/weights/commit")
    async def commit(body: CommitBody) -> dict[str, int]:
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

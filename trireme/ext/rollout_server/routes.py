"""Rollout routes: the endpoints that ms-swift's and TRL's trainers call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import AfterValidator, BaseModel, Field, model_validator

from trireme.aio import one_by_one
from trireme.engines.engine import MOST_SAMPLES
from trireme.ext.http.bodies import JsonRoute, until_gone
from trireme.ext.http.rollouts import Rollouts, as_key
from trireme.ext.multi_turn.scheduler import RolloutInferRequest
from trireme.ext.openai.wire import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Ids,
    Messages,
    Tools,
    each_token,
    prompt_ids,
    refuse_many,
    refuse_paths,
)
from trireme.ext.remote.weight_group import BucketEntry
from trireme.ext.rollout_server.announced import AnnouncedWeights
from trireme.ext.rollout_server.trajectories import infer as infer_all
from trireme.model.chat_tokens import NOT_TEXT
from trireme.model.model import Reply
from trireme.pictures import IMAGES
from trireme.registry import did_you_mean


def refuse_unknown(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise ValueError for a key that has no effect, unless its value asks for nothing: clients
    send empty options of servers that have them.
    """
    known = list(known)
    for name, value in given.items():
        if name not in known and value not in (None, False, "", [], {}):
            hint = did_you_mean(name, known, ": did you mean '{}'?")
            raise ValueError(f"{where} has the unknown key '{name:.100}'{hint}")


class KnownKeys(BaseModel):
    """A body whose unknown keys are refused: a misspelt option would be the default."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_unknown(given, cls.model_fields, "the request")
        return given


class InferBody(KnownKeys):
    """Conversations, and how to sample all of them."""

    infer_requests: Annotated[
        list[RolloutInferRequest], Field(fail_fast=True, max_length=MOST_SAMPLES)
    ]
    request_config: dict[str, Any] | None = None
    use_tqdm: bool | None = None
    key: list[Any] = Field(default_factory=list)
    loss_scale: str = "default"

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_of_requests(cls, given: Any) -> Any:
        requests = given.get("infer_requests") if isinstance(given, dict) else None
        for index, one in enumerate(requests if isinstance(requests, list) else ()):
            if isinstance(one, dict):
                names = [field.name for field in fields(RolloutInferRequest)]
                refuse_unknown(one, names, f"infer_requests.{index}")
        return given


class PromptsBody(KnownKeys):
    """Texts or ids (`prompts`), or conversations (`messages`), n completions each."""

    prompts: (
        Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Ids], Field(fail_fast=True)]
    ) = Field(default_factory=list)
    messages: Annotated[
        list[Annotated[Messages, AfterValidator(refuse_paths)]], Field(fail_fast=True)
    ] = Field(default_factory=list)
    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None = Field(default=None, ge=0)
    """How many of the likeliest tokens to report in addition to each sampled one. Clients that name
    it get a list for each token, others one number.
    """
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further options of `Sampling`, which take precedence."""
    tools: Tools | None = None
    model: str | None = None
    """A label; the server has one model."""


class GroupBody(BaseModel):
    """The address and size of the trainer's process group."""

    host: str
    port: int = Field(ge=1, le=65535)
    world_size: int = Field(default=2, ge=2, le=2)


class ParameterBody(BaseModel):
    """A tensor that is broadcast next."""

    name: str
    dtype: str
    shape: list[int]


class BucketBody(BaseModel):
    """Tensors in one broadcast of bytes."""

    metadatas: list[BucketEntry]


class AdapterBody(BaseModel):
    """LoRA tensors in one broadcast of bytes, and peft's configuration of them."""

    peft_config: dict[str, Any]
    metadatas: list[BucketEntry]


class PathBody(BaseModel):
    """A folder of safetensors."""

    path: str


# Keys of a request configuration that mean nothing here, or only at values other than these.
_ASIDE = {"return_details", "top_logprobs", "logprobs"}
_ONLY: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "num_beams": (1,),
    "length_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "structured_outputs_regex": ("",),
}


def sampling_of(config: dict[str, Any] | None) -> dict[str, Any]:
    """Convert a RequestConfig to our sampling options. Raises ValueError for anything that is not
    served.
    """
    settings = {name: value for name, value in (config or {}).items() if value is not None}
    if settings.get("n", 1) != 1:
        raise ValueError(
            f"request_config.n is {settings['n']}: expected 1; send the request n times"
        )
    for name, without_effect in _ONLY.items():
        if name in settings and settings.pop(name) not in without_effect:
            raise ValueError(f"request_config.{name} is not supported: leave it out")
    options = {n: value for n, value in settings.items() if n not in _ASIDE and n != "n"}
    if settings.get("logprobs"):
        options["logprobs"] = int(settings.get("top_logprobs") or settings["logprobs"])
    return options


def _examine(rollouts: Rollouts, index: int, request: RolloutInferRequest) -> None:
    """Raise ValueError for a conversation that cannot be led."""
    for name in (*NOT_TEXT, *IMAGES):
        if getattr(request, name, None):
            raise ValueError(f"infer_requests.{index}.{name} is not empty: only text is supported")
    if asked := request.chat_template_kwargs:
        raise ValueError(
            f"infer_requests.{index}.chat_template_kwargs is {asked!r:.100}: expected nothing; the "
            "server passes --enable_thinking to the template of every conversation"
        )
    if len(request.messages) > MOST_MESSAGES or len(request.tools or ()) > MOST_TOOLS:
        raise ValueError(
            f"infer_requests.{index} has {len(request.messages)} messages and "
            f"{len(request.tools or ())} tools: expected at most {MOST_MESSAGES} and {MOST_TOOLS}"
        )
    try:
        refuse_paths(request.messages)
    except ValueError as error:
        raise ValueError(f"infer_requests.{index}.messages: {error}") from error
    rollouts.refuse_long(request.messages, request.tools)


def make_router(rollouts: Rollouts) -> APIRouter:
    """Build the routes that ms-swift's and TRL's trainers call."""
    router = APIRouter(route_class=JsonRoute)
    weights = AnnouncedWeights(
        rollouts.engine, model_path=rollouts.model_path, max_bytes=rollouts.max_weight_bytes
    )

    @router.get("/get_world_size/")
    async def world_size() -> dict[str, int]:
        return {"world_size": 1}

    @router.get("/get_model_state_keys/")
    async def keys() -> dict[str, list[str]]:
        return {"keys": sorted(await rollouts.engine.fingerprint() or {})}

    @router.post("/get_engine_type/")
    async def engine_type() -> dict[str, Any]:
        return {
            "engine_type": "AsyncLLMEngine" if rollouts.use_async_engine else "LLMEngine",
            "enable_multi_turn": rollouts.multi_turn,
            "use_gym_env": rollouts.scheduler.get("scheduler")
            in ("gym_scheduler", "openenv_scheduler"),
            "enable_lora": True,
        }

    @router.post("/infer/")
    async def infer(body: InferBody, request: Request) -> list[dict[str, Any]]:
        for index, one in enumerate(body.infer_requests):
            _examine(rollouts, index, one)
        await weights.settled()
        options = sampling_of(body.request_config)
        key = as_key(body.key)
        work = infer_all(
            rollouts, body.infer_requests, options, key=key, loss_scale=body.loss_scale
        )
        return await until_gone(request, work)

    @router.post("/generate/")
    async def generate(body: PromptsBody, request: Request) -> dict[str, Any]:
        await weights.settled()
        return await until_gone(request, _complete(rollouts, body, chat=False))

    @router.post("/chat/")
    async def chat(body: PromptsBody, request: Request) -> dict[str, Any]:
        await weights.settled()
        return await until_gone(request, _complete(rollouts, body, chat=True))

    _add_weights(router, weights)
    return router


def _add_weights(router: APIRouter, weights: AnnouncedWeights) -> None:
    @router.post("/init_communicator/")
    async def init_communicator(body: GroupBody, request: Request) -> dict[str, str]:
        reached, _ = request.scope.get("server") or ("127.0.0.1", 0)
        await weights.join(body.host, body.port, reached=reached)
        return {"message": "the group is being made"}

    @router.post("/update_named_param/")
    async def update_named_param(body: ParameterBody) -> dict[str, str]:
        await weights.receive_tensor(body.name, body.dtype, body.shape)
        return {"message": f"waiting for {body.name}"}

    @router.post("/update_flattened_params/")
    async def update_flattened_params(body: BucketBody) -> dict[str, str]:
        await weights.receive_bucket(body.metadatas)
        return {"message": f"waiting for {len(body.metadatas)} tensors"}

    @router.post("/update_adapter_flattened_param/")
    async def update_adapter_flattened_param(body: AdapterBody) -> dict[str, str]:
        await weights.receive_bucket(body.metadatas, body.peft_config)
        return {"message": f"waiting for {len(body.metadatas)} tensors of an adapter"}

    @router.post("/update_weights_from_path/")
    async def update_weights_from_path(body: PathBody) -> dict[str, str]:
        await weights.load(body.path)
        return {"message": f"loaded {body.path}"}

    async def apply() -> dict[str, Any]:
        version = await weights.ready()
        return {"message": "done", "version": version}

    # with every new weights the prefix cache is empty already
    for name in ("process_weights_after_loading", "reset_prefix_cache", "reset_encoder_cache"):
        router.add_api_route(f"/{name}/", apply, methods=["POST"])
    router.add_api_route("/reset_mm_cache/", apply, methods=["POST"])

    @router.post("/close_communicator/")
    async def close_communicator() -> dict[str, str]:
        await weights.close()
        return {"message": "closed"}


async def _complete(rollouts: Rollouts, body: PromptsBody, *, chat: bool) -> dict[str, Any]:
    """Return completions in the form of TRL's client: prompts in order, each n times."""
    names = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")
    options = body.model_dump(include={*names, "logprobs"}, exclude_none=True)
    options |= body.generation_kwargs

    async def one(prompt: Any) -> list[Reply]:
        rollouts.refuse_long(prompt, body.tools)
        model = rollouts.model((), options)
        if chat:
            return await model.chat_samples(prompt, body.tools)
        return await model.generate_samples(prompt)

    asked = body.messages if chat else body.prompts
    refuse_many(len(asked), options["n"])
    answers = await one_by_one(one(prompt) for prompt in asked)
    replies = [reply for some in answers for reply in some]
    return {
        "prompt_ids": [prompt_ids(some[0], rollouts.chat) for some in answers],
        "completion_ids": [reply.tokens for reply in replies],
        **_logprobs(replies, several="logprobs" in body.model_fields_set),
    }


def _logprobs(replies: list[Reply], *, several: bool) -> dict[str, Any]:
    """Return the log-probabilities of each reply's tokens; `several`: a list for each token, the
    likeliest first, with their ids.
    """
    if not several:
        return {"logprobs": [reply.logprobs for reply in replies]}
    ranked = []
    for reply in replies:
        each = each_token(reply.call.completion)
        known = [{token: logprob} | some for token, logprob, some in each]
        ranked.append([sorted(some.items(), key=lambda one: -one[1]) for some in known])
    return {
        "logprobs": [[[p for _, p in some] for some in tokens] for tokens in ranked],
        "logprob_token_ids": [[[t for t, _ in some] for some in tokens] for tokens in ranked],
    }

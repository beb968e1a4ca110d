"""Engines: specifies a plan's engine, and makes the models beside it: judges and teachers.

Each of `explorer.auxiliary_models` is an engine of its own, embedded or behind servers, or a model
of someone else's behind an OpenAI API. They are never trained and get no new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from transformers import AutoTokenizer

from trireme.aio import running_loop
from trireme.config import Plan
from trireme.config.engine_kind import kind_named
from trireme.config.lookup import Api, located, model_config, plugin_files
from trireme.config.schema_rollout import RolloutModelConfig
from trireme.engines.api import ApiEngine
from trireme.engines.engine import Engine, Sampling
from trireme.engines.make import EngineSpec, make_torch_engine
from trireme.launch.data import Text, chat_template_of
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.rewards.asker import refuse_silent

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from trireme.engines.device import Device
    from trireme.engines.remote import RemoteEngine
    from trireme.explorer.runner import Key


class Endpoint:
    """A model of someone else's server, which answers by the OpenAI clients alone."""

    def __init__(
        self, base_url: str, model_path: str, *, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        """`model_path` is the name that requests give; `timeout` is of one request, in seconds."""
        self.model_path = model_path
        self.base_url = base_url
        self._options: dict[str, Any] = {
            "base_url": base_url,
            "api_key": api_key or "EMPTY",
            "timeout": timeout,
        }
        self._clients: dict[int, AsyncOpenAI] = {}
        self._client: OpenAI | None = None

    def model(self, key: Key) -> Endpoint:
        """What a workflow holds: it remembers nothing, and serves all rollouts."""
        return self

    def blocking(self, loop: asyncio.AbstractEventLoop | None = None) -> Endpoint:
        """What class workflows hold: itself."""
        return self

    def get_openai_async_client(self) -> AsyncOpenAI:
        """The asynchronous client of this event loop; `client.model_path` is set."""
        import openai

        running = running_loop()
        loop = id(running) if running else 0  # 0: in a class workflow's thread, whose loop is later
        if loop not in self._clients or not loop:
            client = openai.AsyncOpenAI(**self._options)
            client.model_path = self.model_path  # type: ignore[attr-defined]
            self._clients[loop] = client
        return self._clients[loop]

    def get_openai_client(self) -> OpenAI:
        """The blocking client; `client.model_path` is set."""
        import openai

        if self._client is None:
            self._client = openai.OpenAI(**self._options)
            self._client.model_path = self.model_path  # type: ignore[attr-defined]
        return self._client

    async def logprobs(self, tokens: Any, temperature: float = 1.0) -> NoReturn:
        """Raises ValueError: the OpenAI API scores no given ids."""
        raise ValueError(
            f"the auxiliary model {self.model_path} at {self.base_url} cannot score given tokens: "
            "a teacher needs its own engine (engine_type torch), or engine_type remote"
        )


LONGEST = 8192
"""Tokens of an auxiliary model whose `max_model_len` is not given: at most, or the run's."""


def engine_spec(plan: Plan, model_path: str) -> EngineSpec:
    """The engine of the trained model, in this process or one of its own."""
    config = plan.config
    rollout = config.explorer.rollout_model
    return EngineSpec(
        model_path,
        plan.max_model_len,
        kind=plan.engine_kind,
        dtype=plan.dtype,
        device=plan.device,
        seed=plan.seed if rollout.seed is None else rollout.seed,
        options=kind_named(plan.engine_kind).options(plan),
        chat_template=chat_template_of(plan),
        enable_thinking=config.model.enable_thinking,
        trust_remote_code=config.model.trust_remote_code,
    )


def engine_plugins(plan: Plan) -> list[str]:
    """Files that a process of the plan's engine loads first; none for a kind of Trireme's own."""
    if type(kind_named(plan.engine_kind)).__module__.startswith("trireme."):
        return []
    return [str(file.resolve()) for file in plugin_files(plan.config.plugins)]


def make_remote_engine(plan: Plan, urls: Sequence[str], key: str | None) -> RemoteEngine:
    """The rollout servers at these addresses."""
    from trireme.engines.remote import RemoteEngine  # httpx, which `check` does without

    timeout = plan.config.explorer.max_timeout
    return RemoteEngine(urls, api_key=key, timeout=timeout, seed=plan.seed)


def make_api_engine(plan: Plan, api: Api, text: Text) -> ApiEngine:
    """Someone else's API."""
    return ApiEngine(
        api.base_url,
        api.name,
        tokenizer=text.tokenizer,
        max_model_len=plan.max_model_len,
        api_key=api.key,
        timeout=plan.config.explorer.max_timeout,
    )


@dataclass(frozen=True)
class Auxiliary:
    """A model that an engine of this run serves, or rollout servers do."""

    engine: Engine
    chat: ChatTokens
    model_path: str
    max_model_len: int
    sampling: Sampling

    def model(self, key: Key) -> Model:
        """What a workflow holds, for one rollout."""
        return Model(
            self.engine,
            self.chat,
            key=key,
            sampling=self.sampling,
            max_model_len=self.max_model_len,
            model_path=self.model_path,
        )


def make_auxiliary(plan: Plan, device: Device) -> list[Auxiliary | Endpoint]:
    """All of the plan's, in the YAML's order."""
    limit = plan.config.explorer.max_timeout
    made: list[Auxiliary | Endpoint] = []
    for config in plan.config.explorer.auxiliary_models:
        if config.engine_type == "external":
            url, name = config.base_urls[0], config.model_path or ""
            made.append(Endpoint(url, name, api_key=config.api_key, timeout=limit))
        else:
            made.append(_make(plan, config, device))
    return made


def examine_auxiliary(plan: Plan, *, teacher: bool = False) -> None:
    """Raise ValueError where one of someone else's does not answer, bench's API included, or where
    the first of them is to be a `teacher` and cannot be one.
    """
    if plan.api is not None:
        refuse_silent(f"model.external_model ({plan.api.name})", plan.api.base_url)
    for index, config in enumerate(plan.config.explorer.auxiliary_models):
        if config.engine_type == "external":
            who = f"explorer.auxiliary_models[{index}] ({config.model_path})"
            refuse_silent(who, config.base_urls[0])
    if teacher and plan.mode in ("both", "explore"):
        theirs = plan.config.explorer.auxiliary_models[0].model_path or ""
        if all(located(path, "models") for path in (theirs, plan.model_path)):
            trust = plan.config.model.trust_remote_code
            tokenizer = AutoTokenizer.from_pretrained(theirs, trust_remote_code=trust)
            ours = AutoTokenizer.from_pretrained(plan.model_path, trust_remote_code=trust)
            refuse_other_vocabulary(theirs, tokenizer, ours)


def refuse_other_vocabulary(teacher: str, theirs: Any, ours: Any) -> None:
    """Raise ValueError unless the teacher's tokenizer reads the ids that the trained model writes.

    `teacher` is the teacher's path.
    """
    if theirs.get_vocab() != ours.get_vocab():
        raise ValueError(
            f"explorer.auxiliary_models[0].model_path ({teacher}) has another "
            "vocabulary than model.model_path: a teacher scores the student's own token ids"
        )


def teacher_len(plan: Plan) -> int | None:
    """Most tokens that the teacher scores; None where only its own server knows."""
    config = plan.config.explorer.auxiliary_models[0]
    here = config.engine_type != "remote" and located(config.model_path or "", "models")
    return auxiliary_len(plan, config) if here else config.max_model_len


def auxiliary_len(plan: Plan, config: RolloutModelConfig) -> int:
    """Tokens that an auxiliary model reads and writes together."""
    positions = int(model_config(config.model_path or "").get("max_position_embeddings") or 0)
    # a judge reads several replies: it may need more than the model that wrote them
    return config.max_model_len or max(plan.max_model_len, min(positions, LONGEST))


def _make(plan: Plan, config: RolloutModelConfig, device: Device) -> Auxiliary:
    path = config.model_path or ""
    trust = plan.config.model.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    longest = auxiliary_len(plan, config)
    engine: Engine
    if config.engine_type == "remote":
        engine = make_remote_engine(plan, config.base_urls, config.api_key)
    else:
        seed = plan.seed if config.seed is None else config.seed
        spec = EngineSpec(
            path,
            longest,
            dtype=plan.dtype,
            device=plan.device,
            seed=seed,
            trust_remote_code=trust,
        )
        engine = make_torch_engine(spec, tokenizer, device)
    chat = ChatTokens(
        tokenizer,
        chat_template=config.chat_template,
        enable_thinking=config.enable_thinking,
        reasoning_parser=config.reasoning_parser,
    )
    reply = config.max_response_tokens or min(plan.max_response_tokens, longest - 1)
    return Auxiliary(engine, chat, path, longest, Sampling(max_tokens=reply))

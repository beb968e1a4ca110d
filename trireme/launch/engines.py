"""Engines: specifies a plan's engine, and makes the models beside it: judges and teachers.

Each of `explorer.auxiliary_models` is an engine of its own, embedded or behind servers, or a model
of someone else's behind an OpenAI API. They are never trained and get no new weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from trireme.config import Plan
from trireme.config.lookup import located
from trireme.config.placement import COLOCATED_SHARE, PASSED
from trireme.config.schema_rollout import RolloutModelConfig
from trireme.engines.engine import Engine, Sampling
from trireme.engines.make import EngineSpec, make_torch_engine
from trireme.launch.data import chat_template_of
from trireme.model.auxiliary import Endpoint
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.rewards.asker import refuse_silent

if TYPE_CHECKING:
    from trireme.engines.device import Device
    from trireme.engines.remote import RemoteEngine
    from trireme.explorer.runner import Key

LONGEST = 8192
"""Tokens of an auxiliary model whose `max_model_len` is not given: at most, or the run's."""


def engine_spec(plan: Plan, model_path: str) -> EngineSpec:
    """The engine of the trained model, in this process or one of its own."""
    config = plan.config
    rollout = config.explorer.rollout_model
    options: dict[str, Any] = {}
    if plan.engine_kind == "vllm":
        options = {name: getattr(rollout, name) for name in PASSED}
        options["extra_engine_args"] = dict(options["extra_engine_args"])
    if plan.takes_turns:
        options["enable_sleep_mode"] = True
        options["gpu_memory_utilization"] = COLOCATED_SHARE
    return EngineSpec(
        model_path,
        plan.max_model_len,
        kind=plan.engine_kind,
        dtype=plan.dtype,
        device=plan.device,
        seed=plan.seed if rollout.seed is None else rollout.seed,
        options=options,
        chat_template=chat_template_of(plan),
        enable_thinking=config.model.enable_thinking,
        trust_remote_code=config.model.trust_remote_code,
    )


def make_remote_engine(plan: Plan, urls: Sequence[str], key: str | None) -> RemoteEngine:
    """The rollout servers at these addresses."""
    from trireme.engines.remote import RemoteEngine  # httpx, which `check` does without

    timeout = plan.config.explorer.max_timeout
    return RemoteEngine(urls, api_key=key, timeout=timeout, seed=plan.seed)


@dataclass(frozen=True)
class Auxiliary:
    """One of them."""

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


@dataclass(frozen=True)
class Served:
    """One behind an OpenAI API."""

    endpoint: Endpoint

    def model(self, key: Key) -> Endpoint:
        """What a workflow holds: it remembers nothing, and serves all rollouts."""
        return self.endpoint


def make_auxiliary(plan: Plan, device: Device) -> list[Auxiliary | Served]:
    """All of the plan's, in the YAML's order."""
    models = plan.config.explorer.auxiliary_models
    return [
        _served(plan, config) if config.engine_type == "external" else _make(plan, config, device)
        for config in models
    ]


def examine_auxiliary(plan: Plan) -> None:
    """Raise ValueError where one of someone else's does not answer."""
    for index, config in enumerate(plan.config.explorer.auxiliary_models):
        if config.engine_type == "external":
            who = f"explorer.auxiliary_models[{index}] ({config.model_path})"
            refuse_silent(who, config.base_urls[0])


def refuse_other_vocabulary(auxiliary: Sequence[Auxiliary | Served], tokenizer: Any) -> None:
    """Raise ValueError unless the first of them reads the ids that the trained model writes."""
    if not auxiliary:
        raise ValueError(
            "explorer.auxiliary_models is empty: the algorithm needs a teacher, the first of them"
        )
    teacher = auxiliary[0]
    if isinstance(teacher, Served):
        raise ValueError(
            "explorer.auxiliary_models[0].engine_type is external: the OpenAI API scores no given "
            "tokens, and a teacher does: expected torch or remote"
        )
    if teacher.chat.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"explorer.auxiliary_models[0].model_path ({teacher.model_path}) has another "
            "vocabulary than model.model_path: a teacher scores the student's own token ids"
        )


def _make(plan: Plan, config: RolloutModelConfig, device: Device) -> Auxiliary:
    path = config.model_path or ""
    trust = plan.config.model.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    # a judge reads several replies: it may need more than the model that wrote them
    longest = config.max_model_len or max(plan.max_model_len, min(_positions(path), LONGEST))
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
        tokenizer, chat_template=config.chat_template, enable_thinking=config.enable_thinking
    )
    reply = config.max_response_tokens or min(plan.max_response_tokens, longest - 1)
    return Auxiliary(engine, chat, path, longest, Sampling(max_tokens=reply))


def _served(plan: Plan, config: RolloutModelConfig) -> Served:
    timeout = plan.config.explorer.max_timeout
    name = config.model_path or ""
    return Served(Endpoint(config.base_urls[0], name, api_key=config.api_key, timeout=timeout))


def _positions(path: str) -> int:
    """The positions that a model was made for; 0 where its folder is not here."""
    folder = located(path, "models")
    config = folder / "config.json" if folder is not None else None
    if config is None or not config.is_file():
        return 0
    facts = json.loads(config.read_text(encoding="utf-8"))
    return int(facts.get("max_position_embeddings") or 0)

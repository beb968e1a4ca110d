"""Auxiliary: makes the further models of a plan, which judge or teach.

Each is an embedded engine in this process, a rollout server, or an OpenAI-compatible endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from trireme.config import Plan
from trireme.config.located import located
from trireme.config.schema.explorer import RolloutModelConfig
from trireme.engines.device import Device
from trireme.engines.engine import Engine, Sampling
from trireme.engines.remote import RemoteEngine
from trireme.engines.torch.engine import TorchEngine
from trireme.model.auxiliary import Endpoint
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model

LONGEST = 32_768
"""Tokens of an auxiliary model whose `max_model_len` is not given, at most."""


@dataclass(frozen=True)
class Auxiliary:
    """One further model: made anew for each rollout, on an engine that is closed with the run."""

    make: Callable[[tuple[Any, ...]], Model | Endpoint]
    """`(batch, task, run)` -> what workflows and judges hold."""
    engine: Engine | None = None


def make_auxiliary(plan: Plan, device: Device) -> list[Auxiliary]:
    """Those of the plan, in their order."""
    models = plan.config.explorer.auxiliary_models
    return [_endpoint(plan, m) if m.engine_type == "external" else _engine(plan, m, device)
            for m in models]  # fmt: skip


def _endpoint(plan: Plan, config: RolloutModelConfig) -> Auxiliary:
    endpoint = Endpoint(
        config.base_urls[0],
        config.model_path or "",
        api_key=config.api_key,
        timeout=plan.config.explorer.max_timeout,
    )
    return Auxiliary(lambda key: endpoint)


def _engine(plan: Plan, config: RolloutModelConfig, device: Device) -> Auxiliary:
    path = config.model_path or ""
    tokenizer = AutoTokenizer.from_pretrained(path)
    length = config.max_model_len or min(_positions(path), LONGEST)
    engine: Engine
    if config.base_urls:
        timeout = plan.config.explorer.max_timeout
        engine = RemoteEngine(
            config.base_urls, api_key=config.api_key, timeout=timeout, seed=plan.seed
        )
    else:
        engine = TorchEngine(
            path,
            tokenizer=tokenizer,
            device=device,
            seed=plan.seed if config.seed is None else config.seed,
            max_model_len=length,
            dtype=plan.dtype,
        )
    chat = ChatTokens(
        tokenizer, chat_template=config.chat_template, enable_thinking=config.enable_thinking
    )
    sampling = Sampling(max_tokens=config.max_response_tokens or plan.max_response_tokens)

    def make(key: tuple[Any, ...]) -> Model:
        return Model(
            engine,
            chat,
            key=key,
            sampling=sampling,
            max_model_len=length,
            max_prompt_tokens=config.max_prompt_tokens,
            model_path=path,
        )

    return Auxiliary(make, engine)


def _positions(path: str) -> int:
    """The positions that the model was made for."""
    folder = located(path, "models") or Path(path)
    config = folder / "config.json"
    found = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return int(found.get("max_position_embeddings") or LONGEST)

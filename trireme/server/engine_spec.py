"""Engine spec: which engine a server stands before; goes as JSON to the process that makes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.model.chat_tokens import ChatTokens
from trireme.server.rollouts import Rollouts

EngineKind = Literal["torch", "vllm"]
MAX_ROWS = 512
"""Rollouts that an embedded engine decodes at once; more wait in its queue."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine, and how its server talks."""

    model: str
    max_model_len: int
    kind: EngineKind = "torch"
    dtype: str = "float32"
    device: str = "cpu"
    """The embedded engine's; vLLM finds its own."""
    seed: int = 42
    options: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's: keys of the YAML's `rollout_model`."""
    chat_template: str | None = None
    enable_thinking: bool | None = None
    trust_remote_code: bool = False
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """See Rollouts."""
    use_async_engine: bool = True

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))


async def make_rollouts(spec: EngineSpec, device: Device, tokenizer: Any) -> Rollouts:
    """The model, loaded, behind what a server does with requests."""
    return Rollouts(
        await _make_engine(spec, device, tokenizer),
        ChatTokens(
            tokenizer, chat_template=spec.chat_template, enable_thinking=spec.enable_thinking
        ),
        spec.model,
        spec.max_model_len,
        scheduler=dict(spec.scheduler),
        use_async_engine=spec.use_async_engine,
        seed=spec.seed,
    )


async def _make_engine(spec: EngineSpec, device: Device, tokenizer: Any) -> Engine:
    if spec.kind == "vllm":
        from trireme.engines.vllm.engine import VllmEngine

        return await VllmEngine.start(
            spec.model,
            tokenizer=tokenizer,
            max_model_len=spec.max_model_len,
            dtype=spec.dtype,
            seed=spec.seed,
            options=spec.options,
        )
    from trireme.engines.torch.engine import TorchEngine

    return TorchEngine(
        spec.model,
        tokenizer=tokenizer,
        device=device,
        max_model_len=spec.max_model_len,
        seed=spec.seed,
        max_rows=MAX_ROWS,
        dtype=spec.dtype,
        device_name=spec.device,
        trust_remote_code=spec.trust_remote_code,
    )

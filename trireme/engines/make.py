"""Make: makes one engine from its specification, for a run, a judge, a server or a chat.

A kind's engine is imported when one is made: a specification can be written without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from trireme.config.engine_kind import EMBEDDED, ROUTING, kind_named
from trireme.engines.engine import Engine

if TYPE_CHECKING:
    from trireme.engines.barrier import RolloutBarrier
    from trireme.engines.device import Device
    from trireme.engines.torch.engine import TorchEngine


@dataclass(frozen=True)
class EngineSpec:
    """The specification of an engine, and of its server if it has one."""

    model: str
    max_model_len: int
    kind: str = EMBEDDED
    """Its name in ENGINES."""
    dtype: str = "float32"
    device: str = "cpu"
    """The embedded engine's device; others find their own."""
    seed: int = 42
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that the engine's kind adds (`EngineKind.options`)."""
    chat_template: str | None = None
    enable_thinking: bool | None = None
    tool_call_parser: str | None = None
    trust_remote_code: bool = False
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Options of the servers' scheduler (`Rollouts`)."""
    use_async_engine: bool = True

    def to_json(self) -> str:
        """Serialize the spec as one line of JSON."""
        return json.dumps(asdict(self))


async def make_engine(
    spec: EngineSpec,
    tokenizer: Any,
    device: Device,
    *,
    barrier: RolloutBarrier | None = None,
    share_with: Any = None,
) -> Engine:
    """Make the engine of the specification's kind, with its model loaded; see EngineKind."""
    kind = kind_named(spec.kind)
    return await kind.make(spec, tokenizer, device, barrier=barrier, share_with=share_with)


def make_torch_engine(
    spec: EngineSpec,
    tokenizer: Any,
    device: Device,
    *,
    barrier: RolloutBarrier | None = None,
    share_with: Any = None,
) -> TorchEngine:
    """Make the engine of this process; `share_with` is the trainer's module whose tensors
    it reads.
    """
    # takes 2 s, and `check` does not need it
    from trireme.engines.torch.engine import TorchEngine
    from trireme.engines.torch.shell import TorchSettings

    return TorchEngine(
        spec.model,
        tokenizer=tokenizer,
        device=device,
        barrier=barrier,
        share_with=share_with,
        settings=TorchSettings(
            seed=spec.seed,
            max_model_len=spec.max_model_len,
            dtype=spec.dtype,
            device=spec.device,
            trust_remote_code=spec.trust_remote_code,
            records_routing=bool(spec.options.get(ROUTING)),
        ),
    )

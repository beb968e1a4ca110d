"""The kind of the embedded engine: in the run's own process, or several in separate processes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from trireme.config.engine_kind import (
    EMBEDDED,
    KEY,
    ROUTING,
    EngineChoice,
    EngineRequest,
    Interpreter,
    records_routing,
)
from trireme.extensions import missing

if TYPE_CHECKING:
    from trireme.config.plan import Plan
    from trireme.engines.barrier import RolloutBarrier
    from trireme.engines.device import Device
    from trireme.engines.make import EngineSpec
    from trireme.engines.torch.engine import TorchEngine


class TorchKind:
    """The kind of the embedded engine. If it is requested by name there may be several."""

    name = EMBEDDED
    keys = ()
    sizes = ("tensor_parallel_size",)
    own_python = False
    sees_with = ""
    reports_experts = True

    def examine(self, request: EngineRequest) -> EngineChoice:
        """Choose how many embedded engines run; several run in separate processes."""
        config, gpus, spread, _ = request
        model = config.explorer.rollout_model
        slower = () if gpus else _slower()
        if model.engine_type != EMBEDDED or model.engine_num == 1 or spread:
            return EngineChoice(notes=slower)
        trainers = int(config.mode == "both")
        if gpus and model.engine_num > gpus - trainers:
            beside = " beside the trainer's" * trainers
            note = (
                f"{KEY}.engine_num ({model.engine_num}): one embedded engine generates, since each "
                f"of several takes a GPU{beside}, and this machine has {gpus}"
            )
            return EngineChoice(notes=(note,))
        note = f"{KEY}.engine_num ({model.engine_num}): one process an engine"
        return EngineChoice(hosts=model.engine_num, notes=(note, *slower))

    def interpreter(self, asked: str | None) -> Interpreter:
        """Return this process's interpreter."""
        return Interpreter(sys.executable, "the embedded engine")

    def options(self, plan: Plan) -> dict[str, Any]:
        """Return whether the experts that it chooses are recorded."""
        return {ROUTING: True} if records_routing(plan.config) else {}

    async def make(
        self,
        spec: EngineSpec,
        tokenizer: Any,
        device: Device,
        *,
        barrier: RolloutBarrier | None = None,
        share_with: Any = None,
    ) -> TorchEngine:
        """Make a TorchEngine."""
        from trireme.engines.make import make_torch_engine

        return make_torch_engine(spec, tokenizer, device, barrier=barrier, share_with=share_with)


def _slower() -> tuple[str, ...]:
    """Return a note where the faster forward pass, which is made for the CPU, is not here."""
    rest = missing("forward_pass", "lean")
    note = f"the embedded engine decodes by transformers' modules: a faster pass {rest}"
    return (note,) if rest else ()

"""Memory: what a trainer's rank will need of its device, as a memory planner estimates it.

Planners are named in manifests, as functions `(stage, places, request)` that return a MemoryPlan
and findings; the first counts. Without one the memory is not known, and activations are computed
again where the file asks for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from trireme.config import Findings
from trireme.registry import MEMORY_PLANNERS

if TYPE_CHECKING:
    from trireme.config.placement import Places
    from trireme.config.stages import StageFacts

GIB = 2**30
LOGIT_NUMBERS = {"cpu": 2**24, "cuda": 2**28}
"""Float32 logits that a chunk may have: 64 MiB on a CPU, whose caches are small; 1 GiB on a GPU."""
MAX_ROWS, KV_TOKENS, PREFIX_TOKENS = 512, 2**18, 2**15
"""The embedded engine's: rollouts that decode at once, their tokens, and the tokens retained of
finished ones.
"""


class MemoryPlan(NamedTuple):
    """The memory that a trainer's rank takes of its device."""

    memory: dict[str, int]
    """Bytes by what for; empty: that is not known."""
    gradient_checkpointing: bool
    """Activations are computed again."""
    engine_share: float | None = None
    """Of a GPU, of an engine that takes turns with the trainer."""


class MemoryRequest(NamedTuple):
    """The question to a planner: one rank of a stage's trainer on a device."""

    tokens: int
    """Of a micro-batch."""
    length: int
    """Tokens of a sequence at most."""
    device: str
    half: bool
    """Blocks compute in bfloat16."""
    hosts: int
    """Engine processes of this machine."""
    takes_turns: bool
    """Trainer and engine take turns on their device."""
    shared: bool
    """The engine reads the trainer's tensors."""
    free: int | None
    """Bytes of a GPU; None: there is none, or how large it is is not known."""


def plan_memory(
    stage: StageFacts, places: Places, request: MemoryRequest
) -> tuple[MemoryPlan, Findings]:
    """Decide whether activations are computed again, and an engine's share of the GPU."""
    findings = Findings()
    trainer = stage.config.trainer
    if request.takes_turns and trainer.save_behind:
        findings.note(
            "trainer.save_behind: checkpoints are written at once all the same, since trainer and "
            "engine take turns on their device"
        )
    planner = next(iter(MEMORY_PLANNERS.values()), None)
    if planner is None:
        return MemoryPlan({}, bool(trainer.enable_gradient_checkpointing)), findings
    return findings.take(planner(stage, places, request)), findings


def in_gib(parts: Mapping[str, int]) -> str:
    """Write `31.2 GiB: weights 12.0, ...`, the largest first, without what is small."""
    large = sorted(((n, b) for n, b in parts.items() if b >= GIB // 10), key=lambda x: -x[1])
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in large)
    return f"{sum(parts.values()) / GIB:.1f} GiB" + (f" ({named})" if named else "")

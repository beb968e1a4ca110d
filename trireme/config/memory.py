"""Memory: asks a memory planner how much device memory a trainer's rank needs.

Planners are named in manifests, as functions `(stage, places, request)` that return a MemoryPlan
and findings; the first counts, and a note names the others. Without one the memory is not known,
and activations are recomputed only if the file asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trireme.config import Findings
from trireme.registry import MEMORY_PLANNERS

if TYPE_CHECKING:
    from trireme.config.engine_kind import EnginePlan
    from trireme.config.placement import Places
    from trireme.config.sizes import Lengths
    from trireme.config.stages import StageFacts
    from trireme.config.sync import SyncPlan

GIB = 2**30
LOGIT_NUMBERS = {"cpu": 2**23, "cuda": 2**28}
"""Most float32 logits of a chunk: 32 MiB on a CPU, whose caches are small; 1 GiB on a GPU."""
STORED_LOGITS = {"cpu": 2**26, "cuda": 2**28}
"""Most float32 logits that are stored for the backward pass; more are computed again."""
MICRO_BATCHES = 2**15, 2**14
"""Tokens of a GPU's micro-batch, unless a number is asked for: a block's products then take several
times as long as to gather its weights and to start its kernels."""
MAX_ROWS, KV_TOKENS, PREFIX_TOKENS = 512, 2**18, 2**15
"""Limits of the embedded engine: rollouts that decode at once, their tokens, and the cached tokens
of finished ones."""


@dataclass(frozen=True)
class MemoryPlan:
    """The device memory of a trainer's rank."""

    needs: dict[str, int]
    """Bytes by purpose; empty: not known."""
    gradient_checkpointing: bool
    """Whether activations are recomputed in the backward pass."""
    engine_share: float | None = None
    """The share of a GPU for an engine that takes turns with the trainer; None: a default."""


class MemoryRequest(NamedTuple):
    """The question to a planner: one rank of a stage's trainer on a device."""

    tokens: int
    """Tokens of a micro-batch."""
    length: int
    """Most tokens of a sequence."""
    device: str
    half: bool
    """Whether blocks compute in bfloat16."""
    hosts: int
    """The number of engine processes on this machine."""
    takes_turns: bool
    """Whether trainer and engine take turns on their device."""
    lock_step: bool
    """Whether explorer and trainer take turns."""
    shared: bool
    """Whether the engine reads the trainer's tensors."""
    free: int | None
    """Bytes that the rank may use: a GPU's, or on a CPU its share of the machine's; None: not
    known.
    """


def request_of(
    lengths: Lengths,
    places: Places,
    engine: EnginePlan,
    sync: SyncPlan,
    *,
    half: bool,
    free: int | None,
) -> MemoryRequest:
    """Return the question to a planner about what has been decided."""
    sleeping = places.num_engines if places.paired and engine.sleeps else 0
    return MemoryRequest(
        tokens=lengths.max_token_len,
        length=lengths.max_model_len,
        device="cuda" if places.present else "cpu",
        half=half,
        hosts=engine.hosts or sleeping,
        takes_turns=sync.takes_turns,
        lock_step=sync.lock_step,
        shared=sync.share_tensors or sync.share_base,
        free=free,
    )


def plan_memory(
    stage: StageFacts, places: Places, request: MemoryRequest
) -> tuple[MemoryPlan, Findings]:
    """Decide whether activations are recomputed, and an engine's share of the GPU."""
    findings = Findings()
    trainer = stage.config.trainer
    if request.takes_turns and trainer.save_behind:
        findings.note(
            "trainer.save_behind: checkpoints are still written at once, since trainer and "
            "engine take turns on their device"
        )
    planners = [*MEMORY_PLANNERS]
    if not planners:
        return MemoryPlan({}, bool(trainer.enable_gradient_checkpointing)), findings
    first, *others = planners
    if others:
        findings.note(
            f"memory planner '{first}': only this one is used, and {', '.join(map(repr, others))} "
            f"{'is' if len(others) == 1 else 'are'} not, since a rank has one memory plan: "
            "leave one extension with a [memory_planner]"
        )
    return findings.take(MEMORY_PLANNERS[first](stage, places, request)), findings


def fitting_tokens(stage: StageFacts, places: Places, request: MemoryRequest) -> int:
    """Return the tokens of a micro-batch: as many as a GPU computes well, as far as they fit, leave
    a tenth of its memory, and do not make recomputation necessary; else those of the request.
    """
    if request.free is None or request.device == "cpu":
        return request.tokens
    least, _ = plan_memory(stage, places, request)
    for tokens in MICRO_BATCHES:
        plan, found = plan_memory(stage, places, request._replace(tokens=tokens))
        fits = plan.needs and sum(plan.needs.values()) <= 0.9 * request.free and not found.problems
        if (
            tokens > request.tokens
            and fits
            and plan.gradient_checkpointing == least.gradient_checkpointing
        ):
            return tokens
    return request.tokens


def in_gib(parts: Mapping[str, int]) -> str:
    """Format `31.2 GiB: weights 12.0, ...`, the largest first, without small ones."""
    large = sorted(((n, b) for n, b in parts.items() if b >= GIB // 10), key=lambda x: -x[1])
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in large)
    return f"{sum(parts.values()) / GIB:.1f} GiB" + (f" ({named})" if named else "")

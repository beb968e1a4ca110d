"""Memory: estimates the device memory of a trainer's rank, in bytes, before anything starts.

An estimate from a decoder's config.json: permanent memory (weights, gradients, moments, reference),
that of a micro-batch, and that of an engine on the same device. Activations are those that
transformers' blocks store for their backward pass; `tests/ext/memory/test_memory.py` compares them
with the memory of a real process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trireme.config import Findings
from trireme.config.engine_kind import LEAST_SHARE, adapter_rank_of, runners_of
from trireme.config.lookup import adapter_facts, model_config
from trireme.config.memory import (
    GIB,
    KV_TOKENS,
    LOGIT_NUMBERS,
    MAX_ROWS,
    PREFIX_TOKENS,
    STORED_LOGITS,
    MemoryPlan,
    MemoryRequest,
    in_gib,
)
from trireme.config.placement import Places
from trireme.config.schema import OptimizerConfig
from trireme.config.shape import ModelShape, experts_of, shape_at
from trireme.config.stages import StageFacts

FLOAT = 4
_CHUNK_COPIES = 4
"""Copies of a chunk of logits: these, their log-softmax, probabilities and gradient; an entropy
term needs one more."""
_GROUP = GIB // 2
"""An allowance for the buffers of a group of NCCL's, which has not been measured."""
_BUCKET = 64 * 2**20
_OF_STEPS = (
    "gradients", "gathered", "activations", "their gradients", "logits", "merged adapter",
)  # fmt: skip
"""The parts that exist only while a trainer computes."""
_OF_MICRO_BATCHES = ("activations", "their gradients", "logits")
"""Those that are estimates: on a CPU half as much again as a process was seen to need."""
_LIBRARIES = {"cpu": 460 * 2**20, "cuda": GIB}
"""Bytes of a process before it has a model: on a CPU Python, torch and transformers, on a GPU CUDA
and its libraries."""
_ASLEEP = _LIBRARIES | {"cuda": 2 * GIB}
"""Bytes that a sleeping engine keeps: on a GPU its graphs and work spaces too, an allowance."""


@dataclass(frozen=True)
class Use:
    """How a trainer uses a model."""

    ranks: int
    """Ranks that share the model."""
    tokens: int
    """Of a micro-batch, on a rank."""
    half: bool
    """Whether blocks compute in bfloat16."""
    device: str
    checkpointing: bool = False
    reference: bool = False
    moves_reference: bool = False
    """Whether the reference follows the policy: it is float32 then."""
    moments: int = 2
    """Numbers that the optimizer stores per weight."""
    critic: ModelShape | None = None
    critic_moments: int = 2
    trains_all: bool = True
    """False: an adapter alone is trained."""
    adapter: int = 0
    """Its numbers."""
    offload: bool = False
    engine: int = 0
    """Bytes of an engine on the same device."""
    engine_sleeps: bool = False
    """Whether the engine frees them, except for its context, while the trainer computes, and the
    trainer frees its steps' memory while the engine generates."""
    parks: bool = False
    """The optimizer's moments are in the CPU's memory then."""
    auxiliary: int = 0
    """Bytes of judges' and teachers' weights on the same device."""
    cache: int = 0
    """Most bytes of the engine's keys, values and packed matrices."""
    cache_rests: bool = False
    """Whether the engine has none of them while the trainer computes."""
    entropy: bool = False
    """Whether the loss has an entropy term."""
    more_groups: int = 0
    """Groups of ranks, or of a rank and the engines, besides the one of all shards."""


def memory_of(shape: ModelShape, use: Use) -> dict[str, int]:
    """Return the bytes of a rank's device by purpose."""
    width = 2 if use.half else FLOAT
    apart = use.ranks > 1
    lies_here = 0 if use.offload and apart else 1
    policy = shape.weights * lies_here // use.ranks
    critic = use.critic.weights * lies_here // use.ranks if use.critic else 0
    trained = policy * use.trains_all  # a critic has no adapter
    held = FLOAT if use.trains_all else width  # untrained weights have the dtype of the computation
    states = {
        "weights": held * policy + FLOAT * critic,
        "gradients": FLOAT * (trained + critic),
        "moments": FLOAT * (use.moments * trained + use.critic_moments * critic),
    }
    if use.adapter:  # with gradients and moments
        states["adapter"] = FLOAT * (2 + use.moments) * use.adapter * lies_here // use.ranks
    if use.reference and use.trains_all:
        held = width if apart and not use.moves_reference else FLOAT
        states["reference"] = held * shape.weights * lies_here // use.ranks
    if apart:  # whole while they compute: the root and two blocks, and what they arrive in and
        # leave by: a buffer of each, and a block's gradient
        gathered = 2 * width * (shape.root + 2 * shape.block) + 2 * FLOAT * shape.block
    else:  # autocast keeps what it has cast: all but experts, which stay in float32
        cast = shape.weights - shape.layers * shape.of_experts
        gathered = width * cast * use.half * use.trains_all
    experts = FLOAT if not apart and use.trains_all else width
    block = use.tokens * (shape.kept * width + shape.kept_by_experts * (experts - width))
    states_too = int(use.tokens * shape.kept_by_states * FLOAT)  # float32 in either computation
    layers = shape.layers * use.tokens * shape.hidden * width + block + states_too
    largest = shape.vocabulary * shape.hidden
    passing = {
        "gathered": gathered,
        "activations": layers
        if use.checkpointing
        else block * shape.layers + states_too * shape.stateful,
        "their gradients": block + states_too,
        "logits": FLOAT
        * (
            _chunk(shape, use) * (_CHUNK_COPIES + use.entropy)
            + _stored(shape, use)
            + largest * use.trains_all
        ),
    }
    # an adapter is merged in float32, a layer at a time, where the model is saved or pushed whole:
    # a weight, its addition and their sum; the micro-batches' own have gone by then
    across = shape.query_width if shape.experts else max(shape.intermediate, shape.query_width)
    merged = 0 if use.trains_all else 3 * FLOAT * shape.hidden * across * lies_here
    # of a side that works and what the other holds while it rests, the larger sum counts
    steps = sum(passing.values()) + states["gradients"]
    beside = steps + states["moments"] * use.parks
    at_rest = _ASLEEP[use.device] if use.engine else 0
    engine = max(use.engine - beside, at_rest) if use.engine_sleeps else use.engine
    return {
        **states,
        **passing,
        "merged adapter": max(merged - sum(passing.values()), 0),
        "sync": FLOAT * largest * apart + _BUCKET,
        "engine": engine,
        "engine's cache": max(use.cache - steps * use.cache_rests, 0),
        "auxiliary models": use.auxiliary,
        "NCCL": _GROUP * (apart + use.more_groups) * (use.device == "cuda"),
        "libraries": _LIBRARIES[use.device],
    }


def engine_share(shape: ModelShape, use: Use, free: int) -> float:
    """Return the share of a GPU of `free` bytes for an engine that alternates with the trainer: a
    twentieth stays free, and the engine gets all that the trainer does not occupy while it rests.
    """
    parts = memory_of(shape, replace(use, engine=0, engine_sleeps=False))
    resting = sum(size for name, size in parts.items() if name not in _OF_STEPS)
    resting -= parts["moments"] * use.parks
    steps = int((free - resting) * 20 / free) - 1
    return max(min(steps / 20, 0.85), LEAST_SHARE)


def _chunk(shape: ModelShape, use: Use) -> int:
    return min(LOGIT_NUMBERS[use.device], use.tokens * shape.vocabulary)


def _stored(shape: ModelShape, use: Use) -> int:
    """Return the logits of several chunks that wait for the backward pass."""
    all_of_them = use.tokens * shape.vocabulary
    stored = LOGIT_NUMBERS[use.device] < all_of_them <= STORED_LOGITS[use.device]
    return all_of_them if stored else 0


def _engine_of(
    stage: StageFacts,
    shape: ModelShape,
    *,
    hosts: int,
    shared: bool,
    apart: bool,
    rests: bool,
    length: int,
    width: int,
    gpus: int,
) -> dict[str, Any]:
    """Return the fields of `Use` about an engine on the trainer's device; on a CPU, in its process.
    Engine processes that do not alternate with the trainer have GPUs of their own, and a trainer
    that reads data has no engine.
    """
    config, explorer = stage.config, stage.config.explorer
    if config.mode != "both" or stage.remote or stage.reads_file:
        return {}
    if hosts:
        return {"engine_sleeps": True} if stage.colocated else {}
    runners = runners_of(config, explorer.rollout_model.engine_num, gpus)
    rows = min(min(runners, config.buffer.batch_size) * config.algorithm.repeat_times, MAX_ROWS)
    tokens = min(rows * length, KV_TOKENS) + PREFIX_TOKENS
    # beside the layers with an adapter in them the engine keeps these without
    by_files = config.synchronizer.sync_method in ("checkpoint", "offline")
    alone = adapter_rank_of(stage, "checkpoint" if by_files else "memory")
    numbers = shape.weights + shape.layers * shape.linear * bool(alone)
    # a process of its own stores new weights next to its old ones until all have arrived
    copies = 0 if shared else 1 + apart
    # one that shares the trainer's base has a copy of the adapter
    adapter = _adapter_of(stage, shape) * width * bool(shared and alone)
    attending = shape.layers if shape.attending is None else shape.attending
    return {
        "engine": copies * width * numbers + adapter,
        "cache": tokens * 2 * width * shape.key_width * attending
        + rows * FLOAT * shape.state * shape.stateful
        + _packed(shape, width) * (not gpus),
        "cache_rests": rests,
    }


def _packed(shape: ModelShape, width: int) -> int:
    """Return the most bytes of matrices that the embedded engine copies while it decodes on a CPU:
    see `pack` of engines/torch/linear.py.
    """
    import torch

    from trireme.engines.torch.linear import packs

    dtype = torch.float32 if width == FLOAT else torch.bfloat16
    alike = not shape.experts and not shape.stateful  # the families of the faster forward pass
    numbers = shape.layers * shape.linear + shape.vocabulary * shape.hidden
    return width * numbers * (alike and packs(dtype))


def _more_groups(stage: StageFacts, places: Places, shards: int, hosts: int) -> int:
    """Return the groups that a rank is in besides that of all shards: of the copies of its shard,
    of a sequence, and with the engines.
    """
    config = stage.config
    copies = places.spread and places.trainer_ranks > shards
    sequence = places.spread and config.trainer.ulysses_sequence_parallel_size > 1
    asked = config.synchronizer.sync_method in ("nccl", "online") and config.mode == "both"
    return copies + sequence + (asked and (places.spread or hosts > 0) and not stage.colocated)


def _adapter_of(stage: StageFacts, shape: ModelShape) -> int:
    """Return the numbers of the adapter that is trained, as if all linear layers had one; 0: there
    is none.
    """
    for lora in stage.config.model.lora_configs or []:
        try:
            return shape.adapter(adapter_facts(lora.path).rank if lora.path else lora.lora_rank)
        except ValueError:  # `check_model` reports the error
            return 0
    return 0


def _auxiliary_of(stage: StageFacts, width: int) -> int:
    """Return the bytes of the auxiliary models' weights that are loaded next to a trainer."""
    models = stage.config.explorer.auxiliary_models if stage.config.mode == "both" else ()
    paths = [m.model_path for m in models if m.engine_type not in ("remote", "external")]
    shapes = [shape_at(path) for path in paths]
    return sum(width * shape.weights for shape in shapes if shape is not None)


def plan_memory(
    stage: StageFacts, places: Places, request: MemoryRequest
) -> tuple[MemoryPlan, Findings]:
    """Decide whether activations are recomputed: as requested, else where the memory is too small
    for them, or that of a GPU not known.

    Too little memory is a problem, or a note.
    """
    tokens, length, device, half, hosts, takes_turns, lock_step, shared, free = request
    findings = Findings()
    config, trainer = stage.config, stage.config.trainer
    asked = trainer.enable_gradient_checkpointing
    trains = config.mode in ("both", "train")
    shape = shape_at(config.model.model_path) if trains else None
    if shape is None:
        if trains:
            findings.add(_note_without_plan(stage))
        return MemoryPlan({}, bool(asked)), findings
    spread = places.spread
    engine: dict[str, Any] = {}
    if not spread or (device == "cuda" and takes_turns):
        facts: dict[str, Any] = {"hosts": hosts, "length": length, "width": 2 if half else FLOAT}
        facts |= {"shared": shared, "apart": places.paired, "rests": lock_step}
        facts["gpus"] = places.present
        engine = _engine_of(stage, shape, **facts)
        engine["auxiliary"] = _auxiliary_of(stage, facts["width"])
    shards = max(places.trainer_ranks, 1)
    if 0 < trainer.fsdp_size < shards:
        shards = trainer.fsdp_size
    critic = None
    if stage.has_critic:  # it turns nothing into words, and has no head for that
        critic = replace(shape_at(config.model.critic_model_path) or shape, tied=True)
    use = Use(
        ranks=shards if spread else 1,
        tokens=tokens,
        half=half,
        device=device,
        checkpointing=bool(asked),
        reference=stage.has_reference,
        moves_reference=config.algorithm.sync_ref_model,
        moments=_moments(config.algorithm.optimizer),
        critic=critic,
        critic_moments=_moments(config.algorithm.critic.optimizer),
        trains_all=not config.model.lora_configs,
        adapter=_adapter_of(stage, shape),
        offload=trainer.offload,
        parks=trainer.park_optimizer and takes_turns and not trainer.offload,
        entropy=stage.has_entropy,
        more_groups=_more_groups(stage, places, shards, hosts),
        **engine,
    )
    share = None
    if use.engine_sleeps and free is not None:
        share = findings.take(_share_of(stage, shape, use, free))
        use = replace(use, engine=int(free * share))
    if trainer.save_behind and not takes_turns:
        findings.add(_note_copy(shape, use))
    needs = memory_of(shape, use)
    unknown = free is None and device == "cuda"
    if asked is None and (unknown or (free is not None and sum(needs.values()) > free)):
        if free is not None and device == "cpu":
            findings.note(
                f"trainer: activations are recomputed (trainer.enable_gradient_checkpointing), "
                f"since {in_gib(needs)} do not fit into {free / GIB:.1f} GiB: that takes longer, "
                "and a small model's compiled passes are not used; a smaller "
                f"trainer.max_token_len_per_gpu ({use.tokens}) may fit without"
            )
        use = replace(use, checkpointing=True)
        needs = memory_of(shape, use)
    if unknown:
        again = ", and activations are recomputed" * (asked is None)
        findings.note(
            f"trainer: the memory of its GPUs is not known, so that nothing checks whether "
            f"{in_gib(needs)} fit{again} (trainer.enable_gradient_checkpointing)"
        )
    if free is not None and sum(needs.values()) > free:
        findings.add(_say_what_is_short(stage, places, needs, use, free))
    return MemoryPlan(needs, use.checkpointing, share), findings


def _note_without_plan(stage: StageFacts) -> Findings:
    """Note that no memory plan exists for this architecture; say nothing before the model is
    downloaded.
    """
    findings = Findings()
    facts = model_config(stage.config.model.model_path)
    if kind := facts.get("model_type"):
        kind += ", a mixture of experts" * bool(experts_of(facts))
        findings.note(
            f"model.model_path: there is no memory plan and no MFU for this kind ({kind}): only "
            "the run will show whether it fits, and trainer.enable_gradient_checkpointing is "
            "off unless it is set"
        )
    return findings


def _share_of(stage: StageFacts, shape: ModelShape, use: Use, free: int) -> tuple[float, Findings]:
    """Return the engine's share of a GPU; a problem if the model does not fit into it."""
    findings = Findings()
    model = stage.config.explorer.rollout_model
    given = "gpu_memory_utilization" in model.model_fields_set
    share = model.gpu_memory_utilization if given else engine_share(shape, use, free)
    numbers = (2 if use.half else FLOAT) * shape.weights
    needed, gets = numbers + _LIBRARIES[use.device], free * share
    if needed > gets:
        findings.problem(
            "mode",
            f"is colocate: next to the idle trainer the engine gets {gets / GIB:.1f} GiB of a "
            f"GPU ({share:g}), and its weights take {needed / GIB:.1f} GiB; more ranks or "
            "trainer.park_optimizer leave it more",
        )
    return share, findings


def _note_copy(shape: ModelShape, use: Use) -> Findings:
    """Note the CPU memory of trainer.save_behind, which nothing else counts."""
    findings = Findings()
    size = FLOAT * shape.weights * (1 + use.moments * use.trains_all) / use.ranks / GIB
    text = f"each rank's copy takes {size:.1f} GiB of the CPU's memory"
    if use.offload and use.ranks > 1:
        text += ", in which trainer.offload keeps weights and moments already"
    findings.note(f"trainer.save_behind: {text}")
    return findings


def _moments(optimizer: OptimizerConfig) -> int:
    return 0 if optimizer.optimizer_type == "sgd" else 2


def _say_what_is_short(
    stage: StageFacts, places: Places, needs: dict[str, int], use: Use, free: int
) -> Findings:
    """Report too little memory as a problem, or as a note if the user wants to try, if the run is
    for GPUs that are not here, if only keys and values lack room (replies may be short), or on a
    CPU if only a micro-batch does.
    """
    findings = Findings()
    short = sum(needs.values()) - free
    more = "more ranks" if stage.config.trainer.fsdp_size == -1 else "a larger trainer.fsdp_size"
    on_gpu = use.device == "cuda"
    ways = [more, "trainer.offload"] if use.ranks > 1 and on_gpu else []
    ways += ["model.lora_configs"] if use.trains_all else []
    each = f" for each of {use.ranks} ranks" * (use.ranks > 1)
    what, has = ("a GPU", "a GPU has") if on_gpu else ("memory", "this machine or container has")
    share = " for each rank" * (not on_gpu and places.trainer_ranks > 1)
    text = (
        f"needs {in_gib(needs)} of {what}{each}, and {has} {free / GIB:.1f} GiB{share}: "
        f"{short / GIB:.1f} GiB are missing; {''.join(f'{way} or ' for way in ways)}a smaller "
        f"trainer.max_token_len_per_gpu ({use.tokens}) takes less"
    )
    if stage.config.ignore_validator_suggestions:
        findings.note(f"trainer {text} (ignore_validator_suggestions)")
    elif not on_gpu and stage.config.cluster.gpu_per_node:  # perhaps it is only checked here
        findings.note(f"trainer {text}; the GPUs of cluster.gpu_per_node are not here")
    elif short <= needs["engine's cache"]:
        findings.note(f"trainer {text}, and so do replies that end early")
    elif not on_gpu and short <= sum(
        needs.get(name, 0) for name in (*_OF_MICRO_BATCHES, "engine's cache")
    ):
        findings.note(
            f"trainer {text}; the estimate may be too high, and the system ends a run that has no "
            "memory left"
        )
    else:
        findings.problem(
            "trainer", f"{text}; ignore_validator_suggestions: true makes this estimate a note"
        )
    return findings

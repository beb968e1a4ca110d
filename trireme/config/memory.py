"""Memory: what a trainer's rank will need of its device, in bytes, before anything starts.

An estimate from a dense model's config.json: what is held all the time (weights, gradients,
moments, reference), what a micro-batch adds, and what the engine takes beside them. Activations are
those that transformers' blocks keep for their backward pass; `tests/trainer/test_memory.py`
compares them with what a process really takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trireme.config.placement import COLOCATED_SHARE, Places, model_config
from trireme.config.stages import Stage

GIB = 2**30
FLOAT = 4
_CHUNK_NUMBERS = {"cpu": 2**24, "cuda": 2**28}  # of logits, as trainer/head.py makes them
_CHUNK_COPIES = 4  # logits, their log-softmax, probabilities and gradient
_BUCKET = 64 * 2**20
_CONTEXT = {"cpu": 0, "cuda": GIB}  # CUDA's own, and what its libraries keep
_OTHERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder's sizes."""

    layers: int
    hidden: int
    intermediate: int
    query_width: int
    """Heads times their width."""
    key_width: int
    vocabulary: int
    tied: bool
    biased: bool
    """Query, key and value have a bias."""
    normed: int = 0
    """Width of the norms of queries and keys of a head."""

    @property
    def block(self) -> int:
        """Weights of a layer."""
        bias = (self.query_width + 2 * self.key_width) * self.biased
        attention = self.hidden * (2 * self.query_width + 2 * self.key_width) + bias
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden + 2 * self.normed

    @property
    def root(self) -> int:
        """Weights outside of the layers: embedding, head, last norm."""
        return self.vocabulary * self.hidden * (2 - self.tied) + self.hidden

    @property
    def weights(self) -> int:
        """All of them."""
        return self.layers * self.block + self.root

    @property
    def kept(self) -> int:
        """Numbers that a layer keeps of a token for its backward pass."""
        return 6 * self.hidden + 3 * self.query_width + 2 * self.key_width + 4 * self.intermediate


def shape_of(facts: Mapping[str, Any]) -> ModelShape | None:
    """By config.json; None where it is of no dense decoder that this knows."""
    facts = {**facts, **(facts.get("text_config") or {})}
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    heads = facts.get("num_attention_heads")
    if any(facts.get(name) for name in _OTHERS) or not all(
        isinstance(facts.get(name), int) for name in (*sizes, "num_attention_heads")
    ):
        return None
    assert isinstance(heads, int)
    width = facts.get("head_dim") or facts["hidden_size"] // heads
    kind = facts.get("model_type")
    return ModelShape(
        *(facts[name] for name in sizes[:3]),
        query_width=heads * width,
        key_width=(facts.get("num_key_value_heads") or heads) * width,
        vocabulary=facts["vocab_size"],
        tied=bool(facts.get("tie_word_embeddings", False)),
        biased=bool(facts.get("attention_bias", kind == "qwen2")),
        normed=width if kind == "qwen3" else 0,
    )


@dataclass(frozen=True)
class Use:
    """How a trainer uses a model."""

    ranks: int
    tokens: int
    """Of a micro-batch, on a rank."""
    half: bool
    """Blocks compute in bfloat16."""
    device: str
    checkpointing: bool = False
    reference: bool = False
    critic: bool = False
    trains_all: bool = True
    """False: an adapter alone is trained, of which the size is left out."""
    offload: bool = False
    engine: int = 0
    """Bytes that an engine takes of the same device."""


def memory_of(shape: ModelShape, use: Use) -> dict[str, int]:
    """Bytes of a rank's device by what they are for."""
    width = 2 if use.half else FLOAT
    apart = use.ranks > 1
    lies_here = 0 if use.offload and apart else 1
    trained = (1 + use.critic) * shape.weights * lies_here // use.ranks
    states = {
        "weights": FLOAT * trained,
        "gradients": FLOAT * trained * use.trains_all,
        "moments": 2 * FLOAT * trained * use.trains_all,
    }
    if use.reference and use.trains_all:
        held = width if apart else FLOAT
        states["reference"] = held * shape.weights * lies_here // use.ranks
    if apart:  # whole while they compute: the root and two blocks, and what they arrive in and
        # leave by: a buffer of each, and a block's gradient
        gathered = 2 * width * (shape.root + 2 * shape.block) + 2 * FLOAT * shape.block
    else:  # autocast keeps what it has cast
        gathered = width * shape.weights * use.half
    block = use.tokens * shape.kept * width
    layers = shape.layers * use.tokens * shape.hidden * width + block
    largest = shape.vocabulary * shape.hidden
    return {
        **states,
        "gathered": gathered,
        "activations": layers if use.checkpointing else block * shape.layers,
        "their gradients": block,
        "logits": FLOAT * (_chunk(shape, use) * _CHUNK_COPIES + largest * use.trains_all),
        "sync": FLOAT * largest * apart + _BUCKET,
        "engine": use.engine,
        "context": _CONTEXT[use.device],
    }


def _chunk(shape: ModelShape, use: Use) -> int:
    return min(_CHUNK_NUMBERS[use.device], use.tokens * shape.vocabulary)


def told(parts: Mapping[str, int]) -> str:
    """`31.2 GiB: weights 12.0, ...`, the largest first, without what is small."""
    large = sorted(((n, b) for n, b in parts.items() if b >= GIB // 10), key=lambda x: -x[1])
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in large)
    return f"{sum(parts.values()) / GIB:.1f} GiB" + (f" ({named})" if named else "")


def plan_memory(
    stage: Stage, places: Places, *, tokens: int, device: str, half: bool, free: int | None
) -> tuple[dict[str, int], bool]:
    """What a trainer's rank takes, nothing where that is not known; and whether activations are
    computed again: as asked for, else on a GPU of `free` bytes whose memory is too small for them.

    What cannot fit is a problem of the stage. `free` None: how large the GPU is is not known.
    """
    config, trainer = stage.config, stage.config.trainer
    asked = trainer.enable_gradient_checkpointing
    trains = config.mode in ("both", "train")
    shape = shape_of(model_config(stage)) if trains else None
    if shape is None:
        return {}, bool(asked)
    on_ray = places.launcher == "ray"
    engine = 0
    if config.mode == "both" and not on_ray and not stage.remote:  # on the trainer's device
        engine = int((free or 0) * COLOCATED_SHARE) if stage.colocated else 2 * shape.weights
    use = Use(
        ranks=max(places.trainer_ranks, 1) if on_ray else 1,
        tokens=tokens,
        half=half,
        device=device,
        checkpointing=bool(asked),
        reference=stage.has_reference,
        critic=stage.has_critic,
        trains_all=not config.model.lora_configs,
        offload=trainer.offload,
        engine=engine if device == "cuda" else 0,
    )
    found = memory_of(shape, use)
    if device == "cuda" and asked is None and (free is None or sum(found.values()) > free):
        use = replace(use, checkpointing=True)
        found = memory_of(shape, use)
    if free is not None and sum(found.values()) > free:
        short = (sum(found.values()) - free) / GIB
        stage.problem(
            "trainer",
            f"needs {told(found)} of a GPU for each of {use.ranks} ranks, and a GPU has "
            f"{free / GIB:.1f} GiB: {short:.1f} GiB are short; more ranks, trainer.offload, "
            f"model.lora_configs or a smaller trainer.max_token_len_per_gpu ({tokens}) take less",
        )
    return found, use.checkpointing

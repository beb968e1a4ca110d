"""Trainer section: how long training goes on, what is saved, and how memory is spent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.config.schema.number import number


@dataclass(frozen=True)
class TrainerConfig:
    """The train loop and its backend."""

    name: str = "trainer"
    """Name of the part, its log and its state file."""
    trainer_type: Literal["torch", "verl", "verl_legacy", "tinker"] = "verl"
    """Whose backend; torch and verl both name this program's own."""
    trainer_strategy: Literal["fsdp", "fsdp2", "megatron"] = "fsdp"
    """How weights are spread over ranks: always by FSDP2; one process spreads nothing."""
    save_interval: int = number(0, at_least=0)
    """Train steps between checkpoints; 0 saves at the end only."""
    save_hf_checkpoint: Literal["always", "never", "last"] = "last"
    """Which checkpoints also hold the model in the Hugging Face layout."""
    max_checkpoints_to_keep: int | None = number(None, at_least=0)
    """Older checkpoints than this many lose their weights; not given, or 0: all stay."""
    save_strategy: Literal["single_thread", "single_process", "single_node", "unrestricted"] = (
        "unrestricted"
    )
    """Who may write at once."""
    total_steps: int | None = number(None, at_least=1)
    """Train steps after which the run ends; not given: when the data ends."""
    enable_preview: bool = True
    """Show sample replies in the monitor."""
    grad_clip: float = number(1.0, above=0)
    """Gradients longer than this are scaled down to it."""
    use_dynamic_bsz: bool = True
    """Cut batches into micro-batches by tokens instead of rows."""
    max_token_len_per_gpu: int | None = number(None, at_least=1)
    """Tokens of a micro-batch; not given: twice `max_model_len`."""
    ulysses_sequence_parallel_size: int = number(1, at_least=1)
    """Ranks that share one sequence; a divisor of the attention heads and of the ranks."""
    fix_actor_microbatch_loss_scale: bool = False
    """Normalise losses over the whole batch; always so here."""
    enable_gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    offload: bool = False
    """Keep shards and optimizer in the CPU's memory, where the optimizer then works: slower."""
    collective_timeout: float = number(1800, above=0)
    """Seconds that trainer ranks may wait for one another; dead ones are seen sooner."""
    trainer_config: dict[str, Any] = field(default_factory=dict)
    """Options of verl, as it spells them."""

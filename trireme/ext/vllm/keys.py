"""Keys: declares the keys of the section `explorer.rollout_model` that only vLLM reads."""

from typing import Annotated

from annotated_types import Ge, Le

from trireme.config.section import After, NoEffect, Section


class VllmModel(Section, defer_build=True):
    """vLLM's own keys."""

    sleep_level: Annotated[int, Ge(1), Le(2), After("gpu_memory_utilization")] = 2
    """How deep vLLM sleeps in mode colocate while the trainer makes a step, whose weights follow: 2
    drops the old ones, 1 copies them to the machine's memory and back. At other times, with LoRA
    and for composites it is always 1."""
    use_v1: Annotated[bool, After("weight_sync_buffer_size"), NoEffect()] = True
    """Version of vLLM's core."""

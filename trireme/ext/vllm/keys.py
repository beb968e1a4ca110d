"""Keys: declares the keys of the section `explorer.rollout_model` that only vLLM reads."""

from typing import Annotated

from trireme.config.section import After, NoEffect, Section


class VllmModel(Section, defer_build=True):
    """vLLM's own keys."""

    use_v1: Annotated[bool, After("weight_sync_buffer_size"), NoEffect()] = True
    """Version of vLLM's core."""

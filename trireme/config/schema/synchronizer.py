"""Synchronizer section: how and when new weights reach the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trireme.config.schema.number import number


@dataclass(frozen=True)
class SynchronizerConfig:
    """How explorer and trainer keep one beat."""

    sync_method: Literal["nccl", "online", "checkpoint", "offline", "memory"] = "nccl"
    """How weights travel: over the GPUs' network (nccl), by files, or inside a process."""
    sync_style: Literal[
        "fixed",
        "explorer_driven",
        "dynamic_by_explorer",
        "trainer_driven",
        "dynamic_by_trainer",
        "fully_async",
    ] = "fixed"
    """Who decides when: both by counting steps, the explorer, or the trainer."""
    sync_interval: int = number(1, at_least=1)
    """Steps between synchronisations."""
    sync_offset: int = number(0, at_least=0)
    """Steps that the explorer runs ahead of the trainer."""
    sync_timeout: float = number(3600, above=0)
    """Seconds that one side waits for the other before the run fails, and says so."""
    wait_for_checkpoint: bool = False
    """Wait for the first checkpoint."""
    explorer_sync_interval: int | None = number(None, at_least=1)
    """The explorer's own interval; not given: `sync_interval`."""
    trainer_sync_interval: int | None = number(None, at_least=1)
    """The trainer's own interval; not given: `sync_interval`."""
